"""The command line: `headrace serve | check`, and the commands that have modules of their own."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import uvloop

from gateway import config
from gateway.backends import backends
from gateway.canary import canary
from gateway.demo import demo
from gateway.descriptors import NoRoom
from gateway.discovery import Undiscoverable
from gateway.doctor import doctor
from gateway.emulate import emulate
from gateway.given import given
from gateway.keys import keys
from gateway.logs import log_to_stderr
from gateway.logview import logs
from gateway.output import Commands
from gateway.serve import serve as serve_gateway
from gateway.supervise import supervise
from gateway.tenants import tenants
from gateway.top import top


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="headrace", prog_name="headrace")
def main() -> None:
    """An OpenAI-compatible gateway for pools of self-hosted model backends.

    \b
    Try it in two minutes, without a GPU:
      headrace demo
    Put it before two engines, no file needed:
      headrace serve --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002
    Or serve from a file, once it is found good:
      headrace check headrace.yaml && headrace serve -c headrace.yaml

    Then point any OpenAI SDK at http://127.0.0.1:8080/v1, or an Anthropic one at http://127.0.0.1:8080.
    """


main.add_command(demo)
main.add_command(doctor)
main.add_command(emulate)
main.add_command(backends)
main.add_command(canary)
main.add_command(keys)
main.add_command(logs)
main.add_command(tenants)
main.add_command(top)


@main.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The configuration file, headrace.yaml.")
@click.option("--backend", "backends", multiple=True, metavar="URL", help="A backend; may be given several times.")
@click.option("--listen", metavar="HOST:PORT", help="Where the API listens.  [default: 127.0.0.1:8080]")
@click.option("--admin", metavar="HOST:PORT", help="Where health, metrics and admin listen.  [default: 127.0.0.1:9090]")
@click.option("--workers", type=click.IntRange(1), default=1, metavar="N", help="Processes on one port.  [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="Announce both addresses as JSON on stdout.")
def serve(
    path: Path | None, backends: tuple[str, ...], listen: str | None, admin: str | None, workers: int, as_json: bool
) -> None:
    """Serve, from a file or before the backends named.

    \b
    headrace serve -c headrace.yaml
    headrace serve --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002
    headrace serve --backend http://127.0.0.1:8001 --listen '[::1]:8080' --admin '[::1]:9090'
    headrace serve -c headrace.yaml --workers 4      # state.url names a Redis, where they share limits

    Without a file any model name is forwarded and everybody on this machine is one tenant. SIGTERM drains: running
    answers may finish, new requests are refused. SIGHUP, or a changed file, is read at once and taken if it is good.
    Exit codes: 0 done, 2 bad usage or configuration, 1 anything else.
    """
    if (path is None) == (not backends):
        raise click.UsageError("Give either a file (-c headrace.yaml) or backends (--backend URL).")
    if path is not None and (listen or admin):
        raise click.UsageError("With a file, the addresses stand in it: server.listen and server.admin.")
    settings = given(path) if path else _opened(backends, listen or "127.0.0.1:8080", admin or "127.0.0.1:9090")
    if workers > 1 and settings.state.url.reveal() == "memory":
        what = "state.url is `memory`, which" if path else "Without a file state.url is `memory`, which"
        raise click.UsageError(
            f"--workers {workers}: {what} one process counts limits in. Name a Redis or Valkey that the workers share, "
            "such as state: {url: redis://127.0.0.1:6379/0} in the file, or start one process."
        )
    log_to_stderr(settings.telemetry.log)
    try:
        announce = partial(_announce, as_json)
        if path is not None and workers > 1:
            sys.exit(uvloop.run(supervise(settings, path, workers, ready=announce)))
        uvloop.run(serve_gateway(settings, path, ready=announce))
    except (NoRoom, Undiscoverable) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        other = "server.listen or server.admin in the file" if path else "--listen or --admin"
        told = error.strerror or str(error)
        advice = f"; choose another address: {other}." if told.startswith("cannot listen") else ""
        raise click.ClickException(told + advice) from error


def _announce(as_json: bool, api_url: str, admin_url: str) -> None:
    if as_json:
        click.echo(json.dumps({"api": api_url, "admin": admin_url}))
    with suppress(OSError):  # a log on a full disk is no reason not to serve
        click.echo(f"headrace serves {api_url}/v1 (health and metrics: {admin_url})", err=True)


def _opened(backends: tuple[str, ...], listen: str, admin: str) -> config.Config:
    try:
        return config.open_pool(backends, listen, admin)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from error


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--diff", type=click.Path(path_type=Path), metavar="OLD", help="Show what changes against another file.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object; problems too, on stdout.")
def check(path: Path, diff: Path | None, as_json: bool) -> None:
    """Check a configuration file.

    Prints it with every default filled in, or all that is wrong with it.

    \b
    headrace check headrace.yaml
    headrace check --diff old.yaml headrace.yaml
    headrace check --json headrace.yaml | jq .pools

    Secrets are shown as their references. Exit code 2 if the file cannot serve, with every problem as
    file:line:column, key, and what to do.
    """
    settings = given(path, as_json)
    if diff is not None:
        lines = config.changes(given(diff, as_json), settings)
        click.echo(json.dumps({"changes": lines}) if as_json else "\n".join(lines) or "no difference")
    elif as_json:
        click.echo(json.dumps(settings.model_dump(mode="json", exclude_none=True), ensure_ascii=False))
    else:
        click.echo(config.effective(settings), nl=False)


if __name__ == "__main__":
    main(prog_name="headrace")
