"""The console's picture for a terminal: what matters most first, in the width and the height that there are."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

FIGURES = (
    ("requests_s", "requests", "{:.1f} /s"),
    ("goodput", "goodput", "{:.1%}"),
    ("ttft_p95_ms", "first token p95", "{:.0f} ms"),
    ("itl_p95_ms", "token gap p95", "{:.1f} ms"),
    ("refused_s", "refused", "{:.1f} /s"),
    ("loop_lag_p99_ms", "loop late p99", "{:.1f} ms"),
)
COLOURS = {"up": "green", "new": "yellow", "trial": "yellow", "draining": "yellow", "resting": "yellow"}
WIDE = 120  # columns, from which on there is room for everything
BAR = 12  # cells
SPARKS = " ▁▂▃▄▅▆▇█"
FEW = 5  # rows of what is shown only in part
Picture = dict[str, Any]


def drawn(now: Picture, width: int = WIDE, rows: int | None = None) -> Group:
    """The whole picture; of backends no more than `rows`, those that are not up before all others."""
    parts: list[RenderableType] = [_head(now), _figures(now, width), *_backends(now["backends"], width, rows)]
    queues = [row for row in now["queues"] if row["waiting"]]
    if queues:
        parts.append(_table("queue by class", queues, "pool", "class", "waiting", "tokens", "oldest_s", "wait_s"))
    if now["waiting"]:
        waiting = now["waiting"][:FEW]
        parts.append(_table("queue by tenant", waiting, "tenant", "pool", "class", "waiting", "oldest_s"))
        parts += _more(len(now["waiting"]) + now["more_waiting"] - len(waiting))
    if now["refusals"]:
        parts.append(_table("refusals", now["refusals"][:FEW], "reason", "lately", "total"))
    parts += _tenants(now, width)
    if now["recent"]:
        parts.append(_recent(now["recent"][:10], width))
    return Group(*parts)


def _head(now: Picture) -> Text:
    hours, seconds = divmod(now["uptime_s"], 3600)
    days, hours = divmod(hours, 24)
    up = f"{f'{days} d ' if days else ''}{hours:02}:{seconds // 60:02}:{seconds % 60:02}"
    workers = f"  {now['workers']} workers" if "workers" in now else ""
    return Text(
        f"headrace {now['version']}  up {up}  configuration {now['generation']}  limits: {now['limiter']}  "
        f"{now['open_requests']} open, {now['open_streams']} streams{workers}{'  DRAINING' if now['draining'] else ''}",
        style="bold",
    )


def _figures(now: Picture, width: int) -> Table:
    made = Table.grid(padding=(0, 2))
    for name, label, shape in FIGURES:
        value = now["figures"][name]
        line = spark(now["history"][name], 60 if width >= WIDE else 40)
        made.add_row(label, "-" if value is None else shape.format(value), Text(line, "cyan"))
    return made


def spark(values: list[float | None], points: int = 60) -> str:
    """The last points as blocks, between 0 and their largest."""
    lately = values[-points:]
    most = max((value for value in lately if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else SPARKS[round(value / most * (len(SPARKS) - 1))] for value in lately)


def bar(share: float | None, cells: int = BAR) -> str:
    """A share of a whole, in blocks; nothing where it is not known."""
    filled = round(min(1.0, max(0.0, share or 0.0)) * cells)
    return "█" * filled + "·" * (cells - filled) if share is not None else " " * cells


def _backends(told: list[Picture], width: int, rows: int | None) -> Iterable[RenderableType]:
    wide, cells = width >= WIDE, BAR if width >= WIDE else 6
    made = _titled("backends")
    made.add_column("pool", overflow="fold")
    made.add_column("backend", overflow="fold", ratio=1 if not wide else None)
    for name in ("state", "in flight", *(("uncached tokens",) if wide else ()), "KV memory"):
        made.add_column(name, no_wrap=True)
    if wide:
        made.add_column("why")
    shown = sorted(told, key=lambda each: each["state"] == "up")[:rows] if rows and len(told) > rows else told
    for each in shown:
        kv = each["kv_share"]
        held = f" ({each['gate']})" if each["state"] == "up" and each["gate"] != "open" else ""
        uncached = f"{bar(each['uncached_tokens'] / each['uncached_budget'])} {each['uncached_tokens']}"
        where = each["backend"] if wide else each["backend"].removeprefix("http://")
        why = "" if wide or not each["why"] else f"\n{each['why']}"
        made.add_row(
            escape(each["pool"]),
            escape(where + why),
            Text(each["state"], COLOURS.get(each["state"], "red")) + Text(held, "yellow"),
            f"{bar(each['running'] / each['concurrency'], cells)} {each['running']}/{each['concurrency']}",
            *((uncached,) if wide else ()),
            f"{bar(kv, cells)} {'-' if kv is None else f'{kv:.0%}'}",
            *((escape(each["why"]),) if wide else ()),
        )
    return [made, *_more(len(told) - len(shown))]


def _tenants(now: Picture, width: int) -> Iterable[RenderableType]:
    """Those that are nearest to a limit, each with that limit."""
    limited = [each for each in now["tenants"] if each["limits"]][:FEW]
    if not limited:
        return []
    made = _titled("tenants, the nearest to a limit first")
    for name in ("tenant", "running", "waiting", "nearest limit"):
        made.add_column(name, overflow="fold", justify="right" if name in ("running", "waiting") else "left")
    for each in limited:
        nearest = max(each["limits"], key=lambda one: one["used"] / one["limit"] if one["limit"] else 0.0)
        share = nearest["used"] / nearest["limit"] if nearest["limit"] else 0.0
        unit = "" if nearest["kind"] == "concurrent" else " a minute"
        model = f" ({nearest['model']})" if nearest["model"] else ""
        told = (
            f"{bar(share, BAR if width >= WIDE else 6)} {nearest['used']:,} of {nearest['limit']:,} {nearest['kind']}"
        )
        made.add_row(escape(each["tenant"]), str(each["running"]), str(each["waiting"]), escape(told + unit + model))
    return [made, *_more(len(now["tenants"]) + now["more_tenants"] - len(limited))]


def _more(number: int) -> list[RenderableType]:
    return [Text(f"and {number} more", "dim")] if number else []


def _titled(title: str) -> Table:
    return Table(box=None, title=title, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))


def _table(title: str, rows: list[Picture], *names: str) -> Table:
    made = _titled(title)
    for name in names:
        text = isinstance(rows[0][name], str)
        made.add_column(HEADS.get(name, name), justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for row in rows:
        made.add_row(*("-" if row[name] is None else escape(str(row[name])) for name in names))
    return made


HEADS = {
    "oldest_s": "oldest (s)",
    "wait_s": "estimate (s)",
    "lately": "last 10 s",
    "total": "since the start",
    "ttft_ms": "first token (ms)",
    "total_ms": "total (ms)",
}


def _recent(rows: list[Picture], width: int) -> Table:
    names = ("tenant", "model", "backend") if width >= WIDE else ("tenant",)
    shown = [
        {
            "ended": time.strftime("%H:%M:%S", time.localtime(row["at"])),
            "outcome": f"slow: {row['cause']}" if row["outcome"] == "ok" else row["outcome"],
            **{name: row[name] or "-" for name in names},
            "ttft_ms": None if row["ttft_ms"] is None else round(row["ttft_ms"], 1),
            "total_ms": round(row["total_ms"], 1),
        }
        for row in rows
    ]
    return _table("slow or failed, the latest first", shown, *shown[0])
