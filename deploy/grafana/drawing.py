"""A dashboard as a picture: its panels in their places, drawn from what Prometheus answered. Not Grafana's drawing, but
the same queries."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

CELL_W, CELL_H = 0.5, 0.27  # inches of a cell of the grid
LEFT, SIDES, BELOW, MARGINS = 1.2, 1.7, 2.3, 3.6  # cells of a panel that are not its axes: left, both; below, both
SHOWN = 6  # names in a legend, rows in a table
DPI, COLOURS = 80, 96
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"


@dataclass(frozen=True)
class Course:
    """One line: its name, and values at times in minutes since the beginning."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


Courses = Mapping[int, Sequence[Course]]
"""What was found, by the panel's id."""


def picture(board: Mapping[str, Any], found: Courses, minutes: float, caption: str, path: Path) -> None:
    """Writes a PNG of few colours. Rows of which nothing was found are left out, and said to be."""
    import matplotlib as mpl  # a development dependency, and slow to import

    mpl.use("agg")
    from matplotlib import pyplot
    from PIL import Image

    placed, height, missing = _placed(board, found)
    figure = pyplot.figure(figsize=(24 * CELL_W, height * CELL_H), facecolor=PAPER)
    note = f"{caption}\nNothing in this scene of: {', '.join(missing)}." if missing else caption
    figure.text(0.01, 1 - 0.9 / height, board["title"], fontsize=15, weight="bold", color=INK)
    figure.text(0.01, 1 - 1.3 / height, note, fontsize=8, color=FAINT, va="top")
    for top, panel in placed:
        if panel["type"] == "row":
            figure.text(0.01, 1 - (top + 0.75) / height, panel["title"], fontsize=11, weight="bold", color=INK)
            continue
        at = panel["gridPos"]
        left, width = (at["x"] + LEFT) / 24, (at["w"] - SIDES) / 24
        bottom, tall = 1 - (top + at["h"] - BELOW) / height, (at["h"] - MARGINS) / height
        axes = figure.add_axes((left, bottom, width, tall))
        KINDS[panel["type"]](axes, panel, found.get(panel["id"], ()))
        axes.set_title(panel["title"], loc="left", fontsize=9, color=INK)
        axes.set_xlim(0, minutes if axes.lines or axes.collections else 1)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, facecolor=PAPER)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def _placed(board: Mapping[str, Any], found: Courses) -> tuple[list[tuple[float, Mapping[str, Any]]], float, list[str]]:
    """Each panel with its distance from the top; the height of all; the rows that are left out. In cells."""
    rows: list[list[Mapping[str, Any]]] = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            rows.append([])
        rows[-1].append(panel)
    placed: list[tuple[float, Mapping[str, Any]]] = []
    top, missing = 2.8, []
    for row, *panels in rows:
        if not any(found.get(panel["id"]) for panel in panels):
            missing.append(row["title"])
            continue
        first = panels[0]["gridPos"]["y"]
        placed.append((top, row))
        placed += [(top + 1 + panel["gridPos"]["y"] - first, panel) for panel in panels]
        top += 1.4 + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - first
    return placed, top, missing


def _lines(axes: Any, panel: Mapping[str, Any], courses: Sequence[Course]) -> None:
    stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    shown = sorted(courses, key=lambda course: -sum(value for value in course.values if value == value))
    if not shown:
        _empty(axes)
        return
    if stacked:
        times = sorted({at for course in shown for at in course.times})
        heights = [_at(course, times) for course in shown]
        axes.stackplot(times, heights, labels=[course.name for course in shown], alpha=0.75, linewidth=0)
    else:
        for course in shown:
            axes.plot(course.times, course.values, label=course.name, linewidth=1.2)
    top = max([y for line in axes.lines for y in line.get_ydata() if y == y], default=0.0)
    axes.set_ylim(0, 1.08 * top if top else None)
    axes.yaxis.set_major_formatter(_formatter(panel["fieldConfig"]["defaults"].get("unit", "short")))
    axes.grid(alpha=0.25)
    _plain(axes)
    handles, names = axes.get_legend_handles_labels()
    if any(names):
        names = [*names[:SHOWN], *(["..."] if len(names) > SHOWN else [])]
        told = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.12), "frameon": False, "handlelength": 1.0}
        axes.legend(handles[: len(names)], names, fontsize=6.5, ncols=3, columnspacing=1.0, labelcolor=INK, **told)


def _number(axes: Any, panel: Mapping[str, Any], courses: Sequence[Course]) -> None:
    values = [value for course in courses for value in course.values if value == value]
    if not values:
        _empty(axes)
        return
    axes.set_ylim(0, 3 * max(values) or 1)  # the number stands above its course
    axes.plot(courses[0].times, courses[0].values, linewidth=1, color=FAINT)
    axes.fill_between(courses[0].times, courses[0].values, alpha=0.15, color=FAINT)
    text = _said(values[-1], panel["fieldConfig"]["defaults"]["unit"])
    axes.text(0.5, 0.7, text, transform=axes.transAxes, ha="center", va="center", fontsize=17, color=INK)
    axes.set_axis_off()


def _heat(axes: Any, _: Mapping[str, Any], courses: Sequence[Course]) -> None:
    """Each bucket less the one below it."""
    bounds = sorted((float(course.name), course) for course in courses)
    if len(bounds) < 2:
        _empty(axes)
        return
    times = sorted({at for course in courses for at in course.times})
    sums = [_at(course, times) for _, course in bounds]
    cells = [[max(0.0, b - a) for a, b in zip(low, high, strict=True)] for low, high in pairwise(sums)]
    used = [number for number, row in enumerate(cells) if any(row)] or [0]
    low, high = used[0], min(used[-1] + 1, len(cells))
    axes.pcolormesh(times, range(high - low), cells[low:high], cmap="Oranges", shading="nearest")
    names = [_said(bound, "s") if isfinite(bound) else "more" for bound, _ in bounds[low + 1 : high + 1]]
    every = -(-len(names) // 8)
    axes.set_yticks(range(0, len(names), every), names[::every])
    _plain(axes)


def _table(axes: Any, _: Mapping[str, Any], courses: Sequence[Course]) -> None:
    axes.set_axis_off()
    last = max((course.times[-1] for course in courses), default=0.0)
    shown = [(course.name, course.values[-1]) for course in courses if course.times[-1] == last]
    for number, (name, value) in enumerate(shown[:SHOWN]):
        axes.text(0.0, 0.92 - number * 0.16, name[:64], transform=axes.transAxes, fontsize=7.5, color=INK)
        axes.text(
            1.0, 0.92 - number * 0.16, f"{value:g}", transform=axes.transAxes, fontsize=7.5, color=INK, ha="right"
        )
    if len(shown) > SHOWN:
        axes.text(0.0, -0.04, f"... {len(shown)} rows", transform=axes.transAxes, fontsize=7.5, color=FAINT)


KINDS: dict[str, Callable[[Any, Mapping[str, Any], Sequence[Course]], None]] = {
    "timeseries": _lines,
    "stat": _number,
    "heatmap": _heat,
    "table": _table,
}


def _at(course: Course, times: Sequence[float]) -> list[float]:
    known = {at: value for at, value in zip(course.times, course.values, strict=True) if value == value}
    return [known.get(at, 0.0) for at in times]


def _empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "nothing in this scene", transform=axes.transAxes, ha="center", fontsize=8, color=FAINT)
    axes.set_axis_off()


def _plain(axes: Any) -> None:
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.xaxis.set_major_formatter(lambda at, _: f"{at:g} min")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _formatter(unit: str) -> Callable[[float, object], str]:
    return lambda value, _: _said(value, unit)


def _said(value: float, unit: str) -> str:
    """As Grafana would put it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"
    sizes = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if unit == "bytes" else ((1e6, "M"), (1e3, "k"))
    for size, name in sizes:
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}" + ("/s" if unit == "reqps" else "")


def number(text: str) -> float:
    """A value as Prometheus writes it; what cannot be drawn is no number."""
    value = float(text)
    return value if value not in (inf, -inf) else nan
