"""The command line: `headrace serve | check | keys | emulate | demo`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click
import uvloop

from gateway import config
from gateway.auth import new_key
from gateway.serve import serve as serve_gateway


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace", prog_name="headrace")
def main() -> None:
    """An OpenAI-compatible gateway for pools of self-hosted model backends.

    \b
    Try it in two minutes, without a GPU:
      headrace demo
    Put it before two engines, no file needed:
      headrace serve --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002
    Then point any OpenAI or Anthropic SDK at http://127.0.0.1:8080/v1.
    """


@main.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The configuration file, headrace.yaml.")
@click.option("--backend", "backends", multiple=True, metavar="URL", help="A backend; may be given several times.")
@click.option("--listen", metavar="HOST:PORT", help="Where the API listens.  [default: 127.0.0.1:8080]")
@click.option("--admin", metavar="HOST:PORT", help="Where health, metrics and admin listen.  [default: 127.0.0.1:9090]")
def serve(path: Path | None, backends: tuple[str, ...], listen: str | None, admin: str | None) -> None:
    """Serve, from a file or before the backends named.

    \b
    headrace serve -c headrace.yaml
    headrace serve --backend http://127.0.0.1:8001 --listen 127.0.0.1:8080

    Without a file any model name is forwarded and everybody on this machine is one tenant. SIGTERM drains: running
    answers may finish, new requests are refused. Exit codes: 0 done, 2 bad usage or configuration, 1 anything else.
    """
    if (path is None) == (not backends):
        raise click.UsageError("Give either a file (-c headrace.yaml) or backends (--backend URL).")
    if path is not None and (listen or admin):
        raise click.UsageError("With a file, the addresses stand in it: server.listen and server.admin.")
    settings = _loaded(path) if path else _opened(backends, listen or "127.0.0.1:8080", admin or "127.0.0.1:9090")
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(serve_gateway(settings, ready=_announce))
    except OSError as error:
        raise click.ClickException(str(error.strerror or error)) from error


def _announce(api_url: str, admin_url: str) -> None:
    click.echo(f"headrace serves {api_url}/v1 (health and metrics: {admin_url})", err=True)


def _loaded(path: Path) -> config.Config:
    try:
        return config.load(path)
    except config.ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def _opened(backends: tuple[str, ...], listen: str, admin: str) -> config.Config:
    try:
        return config.open_pool(backends, listen, admin)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from error


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--diff", type=click.Path(path_type=Path), metavar="OLD", help="Show what changes against another file.")
def check(path: Path, diff: Path | None) -> None:
    """Check a configuration file and print it with every default filled in.

    Secrets are shown as their references. Exit code 2 if the file cannot serve, with every problem as
    file:line:column, key, and what to do.
    """
    settings = _loaded(path)
    if diff is None:
        click.echo(config.effective(settings), nl=False)
    else:
        lines = config.changes(_loaded(diff), settings)
        click.echo("\n".join(lines) or "no difference")


@main.group()
def keys() -> None:
    """Make API keys."""


@keys.command("new")
@click.argument("tenant", default="my-tenant")
def new(tenant: str) -> None:
    """Make a key for TENANT: it is shown once; the configuration gets its hash only."""
    key, digest = new_key()
    click.echo(f"key, for the client, shown only now:  {key}\n\nfor headrace.yaml:")
    click.echo(f'tenants:\n  {tenant}:\n    keys:\n      - {{id: {tenant}-1, sha256: "{digest}"}}')


if __name__ == "__main__":
    main()
