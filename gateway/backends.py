"""`headrace backends`: who serves, why somebody does not, and changes at run time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from gateway.adminport import ADMIN, asked
from gateway.keys import wide


def _reached(command: Callable[..., None]) -> Callable[..., None]:
    """The options by which the gateway is found."""
    file = click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The file that it serves with.")
    port = click.option("--admin", metavar="URL", help=f"Its admin port, where there is no file.  [default: {ADMIN}]")
    return file(port(command))


@click.group()
def backends() -> None:
    """See and change the backends of a running gateway.

    \b
    headrace backends list -c headrace.yaml
    headrace backends drain -c headrace.yaml http://10.0.0.11:8000
    headrace backends add -c headrace.yaml --pool llama http://10.0.0.13:8000

    What is said here holds until the gateway ends, over reloads of its file.
    """


@backends.command("list")
@_reached
@click.option("--json", "as_json", is_flag=True, help="The same and more as one JSON object.")
def list_(path: Path | None, admin: str | None, as_json: bool) -> None:
    """Show every backend: what it is now and why, what runs there, what its engine says.

    \b
    headrace backends list -c headrace.yaml
    headrace backends list --json | jq '.backends[] | select(.state != "up")'
    """
    told = asked(path, admin, "/admin/backends")
    if as_json:
        click.echo(json.dumps(told, ensure_ascii=False))
    else:
        wide().print(table(told["backends"]))


def table(told: list[dict[str, Any]]) -> Table:
    """A row for each backend."""
    made = Table(box=SIMPLE)
    for name in ("pool", "backend", "state"):
        made.add_column(name)
    for name in ("running", "engine runs", "waits", "KV"):
        made.add_column(name, justify="right")
    made.add_column("why")
    for each in told:
        kv = "-" if each["kv_share"] is None else f"{each['kv_share']:.0%}"
        engine = ["-" if each[name] is None else f"{each[name]:.0f}" for name in ("engine_running", "engine_waiting")]
        row = (each["pool"], each["backend"], each["state"], str(each["running"]), *engine, kv, each["why"])
        made.add_row(*map(escape, row))
    return made


def _change(action: str, text: str) -> None:
    @backends.command(action, help=text)
    @click.argument("url")
    @click.option("--pool", help="Its pool; may be left out while there is one.")
    @_reached
    def command(url: str, pool: str | None, path: Path | None, admin: str | None) -> None:
        told = asked(path, admin, f"/admin/backends/{action}", "POST", {"url": url, "pool": pool})
        click.echo(f"{told['backend']} of pool {told['pool']}: {told['state']}")


for _action, _text in {
    "add": "Add a backend to a pool. It gets work once its probes are good.",
    "remove": "Take a backend out of its pool. What runs there goes on.",
    "drain": "Give a backend no new work.",
    "undrain": "Give a drained backend work again.",
}.items():
    _change(_action, _text)
