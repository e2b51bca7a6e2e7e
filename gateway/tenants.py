"""`headrace tenants`: what each tenant may use and uses now, asked of a running gateway's admin port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from gateway.adminport import ADMIN, asked
from gateway.keys import wide

KINDS = {"requests": "requests/min", "tokens": "tokens/min", "concurrent": "at once"}


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The file that the gateway serves with.")
@click.option("--admin", metavar="URL", help=f"Its admin port, where there is no file here.  [default: {ADMIN}]")
@click.option("--json", "as_json", is_flag=True, help="The same and more (keys, models) as one JSON object.")
def tenants(path: Path | None, admin: str | None, as_json: bool) -> None:
    """Show what each tenant uses of its limits now.

    Asks a running gateway. Its address and token are those of the file; without one the token is that of the
    environment variable HEADRACE_ADMIN_TOKEN.

    \b
    headrace tenants -c headrace.yaml
    headrace tenants --admin http://10.0.0.5:9090 --json | jq '.tenants[] | {tenant, running, limits}'
    """
    told = asked(path, admin, "/admin/tenants")
    if as_json:
        click.echo(json.dumps(told, ensure_ascii=False))
    else:
        wide().print(table(told["tenants"]))


def table(told: list[dict[str, Any]]) -> Table:
    """A row for each tenant, and one below it for each model with limits of its own."""
    made = Table(box=SIMPLE)
    made.add_column("tenant")
    for name in ("running", "waiting", *KINDS.values()):
        made.add_column(name, justify="right")
    made.add_column("keys")
    for tenant in told:
        counts = [str(tenant["running"]), str(tenant["waiting"])]
        made.add_row(escape(tenant["tenant"]), *counts, *_cells(tenant["limits"], None), _keys(tenant["keys"]))
        for model in dict.fromkeys(limit["model"] for limit in tenant["limits"] if limit["model"]):
            made.add_row(f"  {escape(model)}", "", "", *_cells(tenant["limits"], model), "")
    return made


def _cells(limits: list[dict[str, Any]], model: str | None) -> list[str]:
    """`150/600 (25%)` for each kind of limit; used beyond the limit is more than 100 %."""
    found = {limit["kind"]: limit for limit in limits if limit["model"] == model}
    return [
        f"{found[kind]['used']}/{found[kind]['limit']} ({found[kind]['used'] / found[kind]['limit']:.0%})"
        if kind in found
        else "-"
        for kind in KINDS
    ]


def _keys(keys: list[dict[str, Any]]) -> str:
    """`2 good, 1 expired`"""
    states = [key["state"] for key in keys]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "-"
