"""`headrace top`: the console's picture in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.adminport import ADMIN, reached
from gateway.keys import wide

FIGURES = (
    ("requests_s", "requests/s", "{:.1f}"),
    ("goodput", "goodput", "{:.1%}"),
    ("ttft_p95_ms", "first token p95", "{:.0f} ms"),
    ("itl_p95_ms", "between tokens p95", "{:.1f} ms"),
    ("refused_s", "refused/s", "{:.1f}"),
    ("loop_lag_p99_ms", "loop late p99", "{:.1f} ms"),
)
COLOURS = {"up": "green", "new": "yellow", "trial": "yellow", "draining": "yellow", "resting": "yellow"}
BAR = 12  # cells
SPARKS = " ▁▂▃▄▅▆▇█"
WAIT_S = 30.0  # for the next event, on a machine that does something else
Picture = dict[str, Any]


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The file that the gateway serves with.")
@click.option("--admin", metavar="URL", help=f"Its admin port, where there is no file here.  [default: {ADMIN}]")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object a second, a line each; with --once one.")
def top(path: Path | None, admin: str | None, once: bool, as_json: bool) -> None:
    """Watch a running gateway: backends, queues, refusals, and the latest slow or failed requests.

    Asks its admin port, like the console at /console there. Its address and token are those of the file; without one
    the token is that of the environment variable HEADRACE_ADMIN_TOKEN. Ctrl-C ends it.

    \b
    headrace top -c headrace.yaml
    headrace top --once --admin http://10.0.0.5:9090
    headrace top --json | jq -c .figures
    """
    with pictures(path, admin) as events:
        if once:
            next(events)  # the first has no second before it to tell rates of
            picture = next(events)
            click.echo(json.dumps(picture, ensure_ascii=False)) if as_json else wide().print(drawn(picture))
        elif as_json:
            for picture in events:
                click.echo(json.dumps(picture, ensure_ascii=False))
        else:
            _follow(events)


@contextmanager
def pictures(path: Path | None, admin: str | None) -> Iterator[Iterator[Picture]]:
    """What `GET /admin/live` sends. Raises ClickException with what to do; Ctrl-C ends it without a word."""
    url, headers = reached(path, admin)
    timeout = httpx.Timeout(10, read=WAIT_S)
    try:
        with httpx.stream("GET", f"{url}/admin/live", headers=headers, timeout=timeout, trust_env=False) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise click.ClickException(f"{url} answers {answer.status_code}: {_said(answer)}")
            yield _events(answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(f"{url} does not answer: {error}. Is it the admin port (server.admin)?") from error
    except StopIteration:
        raise click.ClickException(f"{url} has ended.") from None
    except KeyboardInterrupt:
        pass


def _events(answer: httpx.Response) -> Iterator[Picture]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "it is not the admin port (server.admin), or an older gateway"


def _follow(events: Iterator[Picture]) -> None:
    with Live(screen=True, auto_refresh=False, console=Console()) as live:
        for picture in events:
            live.update(drawn(picture), refresh=True)


def drawn(now: Picture) -> Group:
    """The whole picture."""
    parts: list[RenderableType] = [_head(now), _figures(now), _backends(now["backends"])]
    queues = [row for row in now["queues"] if row["waiting"]]
    if queues:
        parts.append(_table("waiting", queues, "pool", "class", "waiting", "tokens", "oldest_s", "wait_s"))
    if now["waiting"]:
        parts.append(_table("by tenant", now["waiting"], "tenant", "pool", "class", "waiting", "oldest_s"))
    if now["refusals"]:
        parts.append(_table("refusals", now["refusals"], "reason", "lately", "total"))
    if now["recent"]:
        parts.append(_recent(now["recent"][:10]))
    return Group(*parts)


def _head(now: Picture) -> Text:
    draining = "  DRAINING" if now["draining"] else ""
    workers = f"  {now['workers']} workers" if "workers" in now else ""
    up = time.strftime("%j %H:%M:%S", time.gmtime(now["uptime_s"]))
    days = int(up[:3]) - 1
    shown = f"{days} d {up[4:]}" if days else up[4:]
    return Text(
        f"headrace {now['version']}  up {shown}  configuration {now['generation']}  limits: {now['limiter']}  "
        f"{now['open_requests']} open, {now['open_streams']} streams{workers}{draining}",
        style="bold",
    )


def _figures(now: Picture) -> Table:
    made = Table.grid(padding=(0, 2))
    for name, label, shape in FIGURES:
        value = now["figures"][name]
        made.add_row(label, "-" if value is None else shape.format(value), Text(spark(now["history"][name]), "cyan"))
    return made


def spark(values: list[float | None]) -> str:
    """The last minute as blocks, between 0 and its largest."""
    lately = values[-60:]
    most = max((value for value in lately if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else SPARKS[round(value / most * (len(SPARKS) - 1))] for value in lately)


def bar(share: float | None) -> str:
    """A share of a whole, in blocks; nothing where it is not known."""
    filled = round(min(1.0, max(0.0, share or 0.0)) * BAR)
    return "█" * filled + "·" * (BAR - filled) if share is not None else " " * BAR


def _backends(told: list[Picture]) -> Table:
    made = Table(box=None, title="backends", title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for name in ("pool", "backend", "state", "gate", "in flight", "uncached tokens", "KV memory", "why"):
        made.add_column(name)
    for each in told:
        kv = each["kv_share"]
        cells = [
            f"{bar(each['running'] / each['concurrency'])} {each['running']}/{each['concurrency']}",
            f"{bar(each['uncached_tokens'] / each['uncached_budget'])} {each['uncached_tokens']}",
            f"{bar(kv)} {'-' if kv is None else f'{kv:.0%}'}",
        ]
        state = Text(each["state"], COLOURS.get(each["state"], "red"))
        made.add_row(escape(each["pool"]), escape(each["backend"]), state, each["gate"], *cells, escape(each["why"]))
    return made


def _table(title: str, rows: list[Picture], *names: str) -> Table:
    made = Table(box=None, title=title, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        made.add_column(name.replace("_s", " (s)"), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        made.add_row(*("-" if row[name] is None else escape(str(row[name])) for name in names))
    return made


def _recent(rows: list[Picture]) -> Table:
    shown = [
        {
            "ended": time.strftime("%H:%M:%S", time.localtime(row["at"])),
            "outcome": f"slow: {row['cause']}" if row["outcome"] == "ok" else row["outcome"],
            **{name: row[name] or "-" for name in ("tenant", "model", "backend")},
            "ttft_ms": row["ttft_ms"],
            "total_ms": row["total_ms"],
        }
        for row in rows
    ]
    return _table("slow or failed, the latest first", shown, *shown[0])
