"""`headrace top`: the console's picture in a terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gateway.adminport import ADMIN, reached, refused, shown, silent
from gateway.keys import wide
from gateway.topview import Picture, drawn

WAIT_S = 30.0  # for the next event, on a machine that does something else
AGAIN_S = 2.0  # after a connection was lost


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The file that the gateway serves with.")
@click.option("--admin", metavar="URL", help=f"Its admin port, where there is no file here.  [default: {ADMIN}]")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object a second, a line each; with --once one.")
def top(path: Path | None, admin: str | None, once: bool, as_json: bool) -> None:
    """Watch a running gateway: backends, queues, refusals, and the latest slow or failed requests.

    Asks its admin port, like the console at /console there. Its address and token are those of the file; without one
    the token is that of the environment variable HEADRACE_ADMIN_TOKEN. q or Ctrl-C ends it.

    \b
    headrace top -c headrace.yaml
    headrace top --once --admin http://10.0.0.5:9090
    headrace top --json | jq -c .figures
    """
    if not (once or as_json or sys.stdout.isatty()):
        raise click.UsageError("This is no terminal: ask for one picture (--once), or for lines of JSON (--json).")
    where = reached(path, admin)  # before there is a screen of its own, on which nobody would see what is wrong
    with suppress(KeyboardInterrupt):
        if once or as_json:
            _print(*where, once, as_json)
        else:
            with quitting():
                _follow(*where)


def _print(url: str, headers: dict[str, str], once: bool, as_json: bool) -> None:
    with pictures(url, headers) as events:
        for picture in [next(events)] if once else events:
            if as_json:
                click.echo(json.dumps(picture, ensure_ascii=False))
            else:
                console = Console() if sys.stdout.isatty() else wide()
                console.print(drawn(picture, console.width))


@contextmanager
def pictures(url: str, headers: dict[str, str]) -> Iterator[Iterator[Picture]]:
    """What `GET /admin/live` sends. Raises ClickException with what to do."""
    timeout = httpx.Timeout(10, read=WAIT_S)
    try:
        with httpx.stream("GET", f"{url}/admin/live", headers=headers, timeout=timeout, trust_env=False) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise refused(url, answer, headers)
            yield _events(answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise silent(url, error) from error
    except StopIteration:
        raise click.ClickException(f"The gateway at {shown(url)} has ended.") from None


def _events(answer: httpx.Response) -> Iterator[Picture]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _follow(url: str, headers: dict[str, str]) -> None:
    """Until Ctrl-C or q. A gateway that was there once, and is restarted, is waited for."""
    console, seen = Console(), None
    with Live(screen=True, auto_refresh=False, console=console, vertical_overflow="crop") as live:
        while True:
            try:
                with pictures(url, headers) as events:
                    for seen in events:
                        live.update(_fitting(seen, console), refresh=True)
                raise click.ClickException("the gateway has ended, or is being restarted")
            except click.ClickException as error:
                if seen is None:
                    raise
                since = time.strftime("%H:%M:%S", time.localtime(seen["at"]))
                lost = Text(f"NOT CONNECTED, this is {since}: {error.message}", "bold red")
                live.update(Group(lost, _fitting(seen, console)), refresh=True)
            time.sleep(AGAIN_S)


def _fitting(seen: Picture, console: Console) -> Group:
    return drawn(seen, console.width, max(4, console.height // 4))


@contextmanager
def quitting() -> Iterator[None]:
    """q does what Ctrl-C does, and nothing that is typed is shown; the terminal is then as it was."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)

    def read() -> None:
        while (typed := os.read(keyboard, 1)) and typed not in b"qQ":
            pass
        if typed:
            signal.raise_signal(signal.SIGINT)

    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
