"""What a replay comes to: an outcome per request, figures per arm, and the table, rows and plot of all arms."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.results import quantile

OURS = "headrace"
COLUMNS = ("goodput", "ttft_p50", "ttft_p99", "tpot_p99", "refused", "unanswered", "lag_p99")


@dataclass(slots=True)
class Outcome:
    """One request: what its client would have waited for a first token, and what it got. Seconds by the clock; `lag_s`
    is how late it was sent."""

    limit_s: float
    status: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    lag_s: float = 0.0

    def good(self, tpot_s: float) -> bool:
        """Whether it was answered to its end within both objectives."""
        met = self.ttft_s is not None and self.ttft_s <= self.limit_s
        return met and self.tpot_s is not None and self.tpot_s <= tpot_s


@dataclass(slots=True)
class Row:
    """An arm at one load. `skipped` says why it has no figures."""

    name: str
    times: float
    figures: dict[str, float] = field(default_factory=dict)
    skipped: str = ""

    def document(self) -> dict[str, object]:
        return {"arm": self.name, "times": self.times, "skipped": self.skipped or None, **self.figures}


def figures(outcomes: Sequence[Outcome], speed: float, slo_tpot_s: float) -> dict[str, float]:
    """Goodput is a share of all requests. Latencies are of those that began, in the engines' seconds."""
    of = max(1, len(outcomes))
    ttfts = sorted(outcome.ttft_s * speed for outcome in outcomes if outcome.ttft_s is not None)
    tpots = sorted(outcome.tpot_s * speed for outcome in outcomes if outcome.tpot_s is not None)
    return {
        "requests": float(len(outcomes)),
        "goodput": sum(outcome.good(slo_tpot_s / speed) for outcome in outcomes) / of,
        "ttft_p50": quantile(ttfts, 0.5),
        "ttft_p99": quantile(ttfts, 0.99),
        "tpot_p99": quantile(tpots, 0.99),
        "refused": sum(outcome.status not in ("", "200") for outcome in outcomes) / of,
        "unanswered": sum(outcome.status in ("", "200") and outcome.tpot_s is None for outcome in outcomes) / of,
        "lag_p99": quantile(sorted(outcome.lag_s * speed for outcome in outcomes), 0.99),
    }


def ratio(rows: Sequence[Row]) -> float | None:
    """Our goodput at the highest load over that of the best other arm; None without both."""
    most = max((row.times for row in rows), default=0.0)
    found = {row.name: row.figures["goodput"] for row in rows if row.times == most and row.figures}
    best = max((goodput for name, goodput in found.items() if name != OURS), default=0.0)
    return found[OURS] / best if OURS in found and best else None


def markdown(rows: Sequence[Row]) -> str:
    """A line per arm and load, and how many times the best rival's goodput ours is."""
    lines = [
        "| arm | times capacity | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
        *(
            f"| {row.name} | {row.times:g} | " + " | ".join(f"{row.figures[name]:.3f}" for name in COLUMNS) + " |"
            for row in rows
            if row.figures
        ),
        *(f"\n{row.name} skipped: {row.skipped}" for row in rows if row.skipped),
    ]
    if (times := ratio(rows)) is not None:
        lines += ["", f"At the highest load {OURS} serves {times:.1f} times as many in time as the best other arm."]
    return "\n".join(lines)


def write(rows: Sequence[Row], folder: Path, about: str) -> None:
    """replay.md, replay.csv and replay.png."""
    folder.mkdir(parents=True, exist_ok=True)
    head = (
        "# A trace replayed over HTTP\n\n`make replay` repeats it; docs/evaluation.md says more. Goodput: share of all "
        "requests\nwith both objectives met. Latencies in seconds, of the requests that began.\n"
    )
    (folder / "replay.md").write_text(f"{head}\n{markdown(rows)}\n\n{about}.\n")
    with (folder / "replay.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arm", "times", "figure", "value"))
        for row in rows:
            writer.writerows((row.name, f"{row.times:g}", name, f"{value:.6g}") for name, value in row.figures.items())
    draw([row for row in rows if row.figures], folder / "replay.png")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Goodput of each arm, a bar for each load."""
    import matplotlib.pyplot as plt  # slow to import, and only needed here

    arms, loads = list(dict.fromkeys(row.name for row in rows)), sorted({row.times for row in rows})
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for number, times in enumerate(loads):
        own = {row.name: row.figures["goodput"] for row in rows if row.times == times}
        places = [arms.index(arm) + 0.8 * (number - (len(loads) - 1) / 2) / len(loads) for arm in own]
        bars = axis.bar(places, list(own.values()), 0.75 / len(loads), label=f"{times:g} x the capacity")
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.set(xticks=range(len(arms)), xticklabels=arms, ylabel="goodput", ylim=(0, 1.08))
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
