"""`headrace keys new | list`: API keys made, and those of a file shown."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from gateway.auth import new_key
from gateway.config import Config
from gateway.given import given
from gateway.units import instant, seconds

WIDE = 160  # columns of a table, at least


def _moment(_: click.Context, __: click.Parameter, text: str | None) -> datetime | None:
    """A date or a time, or how long from now."""
    if text is None:
        return None
    try:
        return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds(text))
    except ValueError:
        pass  # no duration: then it is a date
    try:
        ends = instant(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; or a duration such as 90d") from error
    if ends <= datetime.now(UTC):
        raise click.BadParameter(f"{text} is over: the key would never be good")
    return ends


@click.group()
def keys() -> None:
    """Make API keys, and show those of a file."""


@keys.command("new")
@click.argument("tenant", default="my-tenant")
@click.option("--id", "key_id", metavar="ID", help="The key's name in the file and the admin API.")
@click.option("--expires", callback=_moment, metavar="TIME", help="When it ends: 2027-01-31, or 90d from now.")
@click.option("--json", "as_json", is_flag=True, help="The key and its entry as one JSON object.")
def new(tenant: str, key_id: str | None, expires: datetime | None, as_json: bool) -> None:
    """Make a key for a tenant.

    The key is shown this once; the configuration gets its hash only. To replace a key, add the new one beside the old
    one, give the old one an end, and remove it when `headrace tenants --json` shows that nobody uses it any more.

    \b
    headrace keys new acme
    headrace keys new acme --expires 90d
    headrace keys new acme --json | jq -r .key
    """
    key, digest = new_key()
    entry = {"id": key_id or f"{tenant}-{digest[:6]}", "sha256": digest}
    if expires is not None:
        entry["expires"] = expires.isoformat().replace("+00:00", "Z")
    if as_json:
        click.echo(json.dumps({"tenant": tenant, "key": key} | entry))
        return
    told = yaml.safe_dump({"tenants": {tenant: {"keys": [entry]}}}, sort_keys=False)
    click.echo(f"key, for the client, shown only now:  {key}\n\nfor headrace.yaml:\n{told}", nl=False)


@keys.command("list")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), required=True, help="The configuration file.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def list_(path: Path, as_json: bool) -> None:
    """Show the keys of a file: whose they are, and until when they are good.

    \b
    headrace keys list -c headrace.yaml
    headrace keys list -c headrace.yaml --json | jq '.keys[] | select(.state == "expired")'
    """
    found = list(listed(given(path, as_json), time.time()))
    if as_json:
        click.echo(json.dumps({"keys": found}))
        return
    table = Table(box=SIMPLE)
    for name in ("tenant", "id", "sha256", "state", "expires"):
        table.add_column(name)
    for key in found:
        table.add_row(key["tenant"], key["id"], key["sha256"][:12], key["state"], key["expires"] or "never")
    wide().print(table)


def listed(settings: Config, now: float) -> Iterator[dict[str, Any]]:
    """One record for each key, in the order of the file."""
    for tenant, told in settings.tenants.items():
        for number, key in enumerate(told.keys, 1):
            yield {
                "tenant": tenant,
                "id": key.id or f"{tenant}-{number}",
                "sha256": key.sha256,
                "state": "expired" if key.expires and key.expires.timestamp() <= now else "good",
                "expires": key.expires.isoformat().replace("+00:00", "Z") if key.expires else None,
            }


def wide() -> Console:
    """For a table whose names must not be cut short: what is wider than the terminal goes on in its next line."""
    return Console(width=max(WIDE, Console().width))
