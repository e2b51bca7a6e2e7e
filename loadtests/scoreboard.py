"""The rows of the comparison: medians, ratios, the printed table, and what goes to files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

# A core used more than this is what limited the phase.
SATURATED = 0.9
CEILING = "nginx"
OURS = "headrace"
RATIOS = {"us_per_request": "json", "us_per_chunk": "streams"}


@dataclass(slots=True)
class Row:
    """One arm: for each phase the figures of every round. `skipped` says why there are none, `failed` which phase did
    not work and why."""

    name: str
    skipped: str = ""
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, phase: str, figures: dict[str, float]) -> None:
        self.phases.setdefault(phase, []).append(figures)

    def medians(self, phase: str) -> dict[str, float]:
        """The median of each figure over the rounds; empty where the phase did not run."""
        rounds = self.phases.get(phase, [])
        names = {name: None for figures in rounds for name in figures}
        return {name: median(figures[name] for figures in rounds if name in figures) for name in names}

    def value(self, phase: str, name: str) -> float | None:
        return self.medians(phase).get(name)

    def bottleneck(self, phase: str) -> str:
        """Which core was full: the proxy's, the one of load generator and origin ("load"), both, neither."""
        used = self.medians(phase)
        loads = {"proxy": used.get("proxy_cpu", 0.0), "load": used.get("origin_cpu", 0.0) + used.get("client_cpu", 0.0)}
        return "+".join(name for name, share in loads.items() if share >= SATURATED) or "-"

    def document(self) -> dict[str, object]:
        return {
            "arm": self.name,
            "skipped": self.skipped or None,
            "failed": self.failed,
            **{phase: {**self.medians(phase), "bottleneck": self.bottleneck(phase)} for phase in self.phases},
        }


def ratio(rows: Sequence[Row], row: Row, base: str, figure: str) -> float | None:
    """`figure` of the row over that of the arm named `base`, in the phase that RATIOS gives it."""
    phase = RATIOS[figure]
    own = row.value(phase, figure)
    other = next((each.value(phase, figure) for each in rows if each.name == base), None)
    return own / other if own and other else None


Column = tuple[str, str, str, str]  # heading, phase, figure, format
COST: list[Column] = [
    ("us/request", "json", "us_per_request", ".1f"),
    ("requests/s", "json", "requests_per_s", ",.0f"),
    ("p99 ms", "json", "request_p99_ms", ".2f"),
    ("us/chunk", "streams", "us_per_chunk", ".1f"),
    ("us/chunk @2000", "crowd", "us_per_chunk", ".1f"),
    ("chunks/s @2000", "crowd", "chunks_per_s", ",.0f"),
]
FEEL: list[Column] = [
    ("TTFT p50 ms", "streams", "ttft_p50_ms", ".1f"),
    ("TTFT p99", "streams", "ttft_p99_ms", ".1f"),
    ("gap p50 ms", "streams", "gap_p50_ms", ".1f"),
    ("gap p99", "streams", "gap_p99_ms", ".1f"),
    ("TTFT p99 @2000", "crowd", "ttft_p99_ms", ".1f"),
    ("gap p50 @2000", "crowd", "gap_p50_ms", ".1f"),
    ("gap p99 @2000", "crowd", "gap_p99_ms", ".1f"),
    ("KB/idle stream", "idle", "kb_per_idle_stream", ".1f"),
    ("KB/unread", "unread", "kb_per_unread_stream", ",.0f"),
]
LOAD_PHASES = ("json", "streams", "crowd")


def ran(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """The columns whose phase any row has run."""
    return [column for column in columns if any(column[1] in row.phases for row in rows)]


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    found = ((row.value(phase, figure), form) for _, phase, figure, form in columns)
    return ["-" if value is None else format(value, form) for value, form in found]


def cost_table(rows: Sequence[Row]) -> list[list[str]]:
    """Heading and lines of the first table: CPU of the proxy and its ratios."""
    columns = ran(rows, COST)
    bases = [base for base in (CEILING, OURS) if any(row.name == base and not row.skipped for row in rows)]
    heading = ["arm", *(column[0] for column in columns)]
    lines = [[*heading, *(f"{kind} / {base}" for base in bases for kind in ("req", "chunk"))]]
    for row in rows:
        ratios = [ratio(rows, row, base, figure) for base in bases for figure in RATIOS]
        texts = ["-" if value is None else f"{value:.2f}x" for value in ratios]
        lines.append([row.name, *cells(row, columns), *texts])
    return lines


def feel_table(rows: Sequence[Row]) -> list[list[str]]:
    """The second table: latency and memory."""
    columns = ran(rows, FEEL)
    return [["arm", *(column[0] for column in columns)], *([row.name, *cells(row, columns)] for row in rows)]


def load_table(rows: Sequence[Row]) -> list[list[str]]:
    """The third: the share of a core that proxy, origin, client and strangers used, and which core was full."""
    phases = [phase for phase in LOAD_PHASES if any(phase in row.phases for row in rows)]
    lines = [["arm", *(f"{phase}: proxy origin client others" for phase in phases), "full core"]]
    for row in rows:
        shares = [row.medians(phase) for phase in phases]
        parts = [[used.get(f"{part}_cpu", 0.0) for part in ("proxy", "origin", "client", "others")] for used in shares]
        texts = [" ".join(f"{100 * share:.0f} %" for share in four) if any(four) else "-" for four in parts]
        lines.append([row.name, *texts, " ".join(row.bottleneck(phase) for phase in phases)])
    return lines


TABLES = {"CPU of the proxy": cost_table, "Latency and memory": feel_table, "Who was busy": load_table}


def show(rows: Sequence[Row], console: Console) -> None:
    measured = [row for row in rows if row.phases]
    for title, lines in TABLES.items():
        heading, *rest = lines(measured)
        table = Table(title=title, box=box.SIMPLE, title_justify="left")
        for number, name in enumerate(heading):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for line in rest:
            table.add_row(*line)
        console.print(table)
    for note in notes(rows):
        console.print(note, style="yellow", markup=False, highlight=False)


def notes(rows: Sequence[Row]) -> list[str]:
    """What is missing from the tables, and why."""
    skipped = [f"{row.name} skipped: {row.skipped}" for row in rows if row.skipped]
    few = [(row.name, row.value("streams", "streams")) for row in rows]
    most = max((number for _, number in few if number), default=0)
    skipped += [f"{name} had {number:.0f} streams, not {most:.0f}" for name, number in few if number and number < most]
    return skipped + [f"{row.name} failed in {phase}: {why}" for row in rows for phase, why in row.failed.items()]


def write(rows: Sequence[Row], directory: Path, about: str) -> None:
    """overhead.md, overhead.csv (medians) and overhead.png; `about` says what was compared and where."""
    directory.mkdir(parents=True, exist_ok=True)
    measured = [row for row in rows if row.phases]
    parts = [f"## {title}\n\n{markdown(lines(measured))}\n" for title, lines in TABLES.items()]
    (directory / "overhead.md").write_text(
        "\n".join(
            [
                "# Overhead\n",
                f"{about}. Medians; only ratios within a run mean anything.\n",
                *parts,
                *(f"- {note}" for note in notes(rows)),
                "",
            ]
        )
    )
    with (directory / "overhead.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "phase", "figure", "median", "rounds"])
        for row in measured:
            for phase, rounds in row.phases.items():
                for name, value in row.medians(phase).items():
                    writer.writerow([row.name, phase, name, f"{value:.6g}", len(rounds)])
    plot(measured, directory / "overhead.png")


def markdown(lines: list[list[str]]) -> str:
    heading, *rest = lines
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, rule, *rest))


def plot(rows: Sequence[Row], path: Path) -> None:
    """CPU per request and per chunk as bars, on logarithmic axes: the arms differ by three orders."""
    import matplotlib as mpl  # an optional dependency, and slow to import

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(rows) + 1.5), layout="constrained", sharey=True)
    measured = [row for row in rows if row.value("json", "requests_per_s") and row.name != "direct"]
    for axis, (name, phase) in zip(axes, RATIOS.items(), strict=True):
        values = [row.value(phase, name) or 0.0 for row in measured]
        colours = ["#0b6e99" if row.name == OURS else "#9aa5ab" for row in measured]
        bars = axis.barh([row.name for row in measured], values, color=colours)
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set_xscale("log")
        axis.set_xlabel(f"CPU {name.replace('_', ' ').replace('us', 'µs')}")
        axis.spines[["top", "right"]].set_visible(False)
    if measured:
        axes[0].invert_yaxis()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
