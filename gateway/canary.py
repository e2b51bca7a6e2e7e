"""`headrace canary`: whether new versions do as well as those that they would replace."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from gateway.adminport import ADMIN, asked
from gateway.keys import wide


@click.group()
def canary() -> None:
    """See how new versions of models do (models.NAME.canary in the file).

    \b
    headrace canary status -c headrace.yaml
    """


@canary.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The file that it serves with.")
@click.option("--admin", metavar="URL", help=f"Its admin port, where there is no file.  [default: {ADMIN}]")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def status(path: Path | None, admin: str | None, as_json: bool) -> None:
    """Compare each canary with the version that it would replace.

    \b
    headrace canary status -c headrace.yaml
    headrace canary status --json | jq '.canaries[] | select(.difference.failed.verdict == "worse")'

    In brackets stand 95 % confidence intervals. They are those of what one gateway process saw since its canary is
    what it is.
    """
    told = asked(path, admin, "/admin/canary")
    if as_json:
        click.echo(json.dumps(told, ensure_ascii=False))
        return
    if not told["canaries"]:
        click.echo("no model has a canary")
    for each in told["canaries"]:
        click.echo(heading(each))
        wide().print(table(each))


def heading(told: dict[str, Any]) -> str:
    """What is compared."""
    new = f"pool {told['pool']}" if told["pool"] else f"backends {', '.join(told['backends'])}"
    since = datetime.fromtimestamp(told["since"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return f"{told['model']}: {new} for {told['weight']:.2%} of the {told['sticky']}s, since {since}"


def table(told: dict[str, Any]) -> Table:
    """A row for each measure."""
    made = Table(box=SIMPLE)
    made.add_column("")
    for name in ("stable", "canary", "canary against stable"):
        made.add_column(name, justify="right")
    made.add_column("verdict")
    old, new = told["versions"]["stable"], told["versions"]["canary"]
    made.add_row("attempts", str(old["attempts"]), str(new["attempts"]), "", "")
    for name, found in told["difference"].items():
        shares = [_bracketed(side[name], "{:.2%}") if side["attempts"] else "-" for side in (old, new)]
        made.add_row(name, *map(escape, shares), escape(_bracketed(found, "{:+.2%}")), found["verdict"])
    for name, found in told["ratio"].items():
        times = [_milliseconds(side[f"{name}_s"]) for side in (old, new)]
        made.add_row(name, *times, escape(_bracketed(found, "x{:.3f}")), found["verdict"])
    return made


def _bracketed(found: dict[str, Any], form: str) -> str:
    if "low" not in found:
        return "-"
    return f"{form.format(found['estimate'])} [{form.format(found['low'])}, {form.format(found['high'])}]"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
