"""Run the evaluation, and write its tables and curves.

`python -m loadtests.report` (`make eval`) simulates what loadtests/experiments.py lists, and writes Markdown, CSV and
PNG into loadtests/results/, with what was reached beside what should be (loadtests/goals.py). Finished runs are kept in
.cache/eval, by everything that they depend on (scenario, seed, the code of the engine and the policies), so that it can
be interrupted and goes on where it was; `--finished` writes the tables of what is there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtests.experiments import CURVES, EXPERIMENTS, FAIRNESS_CURVE, HELD_OUT, QUICK, Experiment
from loadtests.goals import ACCEPTED, GOALS
from loadtests.results import Figures, mean_ci
from loadtests.scenario import Scenario
from loadtests.simulate import run_all

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "eval"
RESULTS = Path(__file__).parent / "results"
# What a published policy's run depends on; headrace's depends on all of policies/ besides.
_RIG = "kvcache batch engine profiles traces tracefile scenario workload fleet router simulation results simulate"
_POLICIES = "immediate queued baselines"

Cell = tuple[Scenario, int]


class Store:
    """Finished runs on disk."""

    def __init__(self, folder: Path = CACHE) -> None:
        self._folder = folder
        rig = [ROOT / "loadtests" / f"{name}.py" for name in _RIG.split()]
        published = [ROOT / "loadtests" / f"{name}.py" for name in _POLICIES.split()]
        own = [ROOT / "loadtests" / "gateways.py", *sorted((ROOT / "policies").glob("*.py"))]
        self._code = {True: _digest(rig + own), False: _digest(rig + published)}

    def get(self, cell: Cell) -> Figures | None:
        path = self._path(cell)
        found: Figures | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def put(self, cell: Cell, figures: Figures) -> None:
        path = self._path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(figures))
        partial.replace(path)

    def _path(self, cell: Cell) -> Path:
        scenario, seed = cell
        what = json.dumps([asdict(scenario), seed, self._code[scenario.policy == "headrace"]], sort_keys=True)
        return self._folder / f"{blake2b(what.encode(), digest_size=16).hexdigest()}.json"


def _digest(files: Iterable[Path]) -> str:
    state = blake2b(digest_size=16)
    for file in files:
        state.update(file.read_bytes())
    return state.hexdigest()


def complete(experiments: Sequence[Experiment], store: Store, jobs: int) -> None:
    """Run what is missing, our own first."""
    cells = list(dict.fromkeys(cell for experiment in experiments for cell in experiment.cells()))
    cells.sort(key=lambda cell: cell[0].policy != "headrace")
    missing = [cell for cell in cells if store.get(cell) is None]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("simulating", total=len(cells), completed=len(cells) - len(missing))
        for scenario, seed, figures in run_all(missing, jobs):
            store.put((scenario, seed), figures)
            progress.advance(task)


def rows(experiment: Experiment, store: Store) -> Iterator[dict[str, object]]:
    """One record per row, point and figure: mean and 95 % interval over the seeds that have been run, and those of the
    difference from the first row, seed by seed."""
    for point in experiment.points:
        first: dict[int, Figures] | None = None
        for row in experiment.rows:
            cells = {seed: store.get((experiment.scenario(row, point), seed)) for seed in experiment.seeds}
            runs = {seed: run for seed, run in cells.items() if run is not None}
            first = runs if first is None else first
            paired = [(run, first[seed]) for seed, run in runs.items() if seed in first]
            for figure in next(iter(runs.values()), ()):
                mean, half = mean_ci([run[figure] for run in runs.values()])
                gap, gap_half = mean_ci(
                    [run[figure] - other.get(figure, run[figure]) for run, other in paired] or [0.0]
                )
                yield {
                    "experiment": experiment.name,
                    "row": row,
                    "point": point,
                    "figure": figure,
                    "seeds": len(runs),
                    "mean": mean,
                    "ci95": half,
                    "difference": gap,
                    "difference_ci95": gap_half,
                }


def markdown(experiment: Experiment, records: Sequence[dict[str, object]]) -> str:
    """The experiment's tables: a figure each, rows by points."""
    by = {(r["figure"], r["row"], r["point"]): r for r in records}
    lines = [
        f"## {experiment.title}",
        "",
        f"Mean of {_seeds(records)} seeds \u00b1 half the 95 % interval. {experiment.note}",
        "",
    ]
    for figure in experiment.figures:
        lines += [f"| {figure} | " + " | ".join(experiment.points) + " |", "|---" * (len(experiment.points) + 1) + "|"]
        for row in experiment.rows:
            cells = [by.get((figure, row, point)) for point in experiment.points]
            if any(cells):
                lines.append(f"| {row} | " + " | ".join("" if c is None else _shown(c) for c in cells) + " |")
        lines.append("")
    return "\n".join(lines + _against(experiment, by))


def _seeds(records: Sequence[dict[str, object]]) -> str:
    numbers = sorted({int(str(record["seeds"])) for record in records})
    return " or ".join(map(str, numbers)) if len(numbers) < 3 else f"{numbers[0]} to {numbers[-1]}"


def _against(experiment: Experiment, by: Mapping[tuple[object, object, object], dict[str, object]]) -> list[str]:
    """What should be reached, what was, and what is missing of it (nothing within `ACCEPTED`), if there are goals."""
    goals = GOALS.get(experiment.name, {})
    if not goals:
        return []
    lines = [f"Goal, reached, and what is missing beyond the accepted {ACCEPTED:g}:", ""]
    lines += ["| goodput | " + " | ".join(experiment.points) + " |", "|---" * (len(experiment.points) + 1) + "|"]
    for row, wanted in goals.items():
        pairs = zip(wanted, (by.get(("goodput", row, point)) for point in experiment.points), strict=True)
        cells = ["" if record is None else _missed(goal, float(str(record["mean"]))) for goal, record in pairs]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _missed(goal: float, reached: float) -> str:
    missing = goal - ACCEPTED - reached
    return f"{goal:.3f}, {reached:.3f}, " + (f"**{missing:.3f}**" if missing > 0.0 else "met")


def _shown(record: dict[str, object]) -> str:
    mean, half = float(str(record["mean"])), float(str(record["ci95"]))
    places = 3 if abs(mean) < 2 else 1 if abs(mean) < 1000 else 0
    return f"{mean:.{places}f} \u00b1{half:.{places}f}" if record["seeds"] != 1 else f"{mean:.{places}f}"


def draw(experiment: Experiment, records: Sequence[dict[str, object]], path: Path) -> None:
    """The experiment's figures over the setting that it varies, one panel each."""
    import matplotlib.pyplot as plt  # slow to import, and only needed here

    panels = experiment.figures
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], panels, strict=True):
        for row in experiment.rows:
            points = [r for r in records if r["row"] == row and r["figure"] == name]
            x = [float(experiment.points[str(r["point"])][experiment.curve]) for r in points]
            y, half = ([float(str(r[key])) for r in points] for key in ("mean", "ci95"))
            axis.errorbar(x, y, half, label=row, marker="o", markersize=3, linewidth=1.2, capsize=2)
        axis.set(title=name, xlabel=experiment.curve)
        if name.startswith("ttft"):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(experiment.title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(experiments: Sequence[Experiment], store: Store, folder: Path) -> None:
    """All tables into evaluation.md and evaluation.csv, all curves beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, object]] = []
    parts = ["# Evaluation", "", "Simulated; `make eval` repeats it. docs/evaluation.md has the model.", ""]
    for experiment in experiments:
        if not (own := list(rows(experiment, store))):
            continue
        records += own
        parts.append(markdown(experiment, own))
        if experiment.curve:
            draw(experiment, own, folder / f"{experiment.name}.png")
            parts += [f"![{experiment.title}]({experiment.name}.png)", ""]
    (folder / "evaluation.md").write_text("\n".join(parts))
    with (folder / "evaluation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()} for record in records
        )


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="A minute's worth, to see that it works.")
@click.option("--only", multiple=True, help="Experiments by name.")
@click.option("--finished", is_flag=True, help="Simulate nothing more: the tables of what has been run.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Processes.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE)
def main(quick: bool, only: Sequence[str], finished: bool, jobs: int, out: Path, cache: Path) -> None:
    """Simulate the evaluation and write its tables and curves."""
    experiments = list(QUICK if quick else (*EXPERIMENTS, *CURVES, FAIRNESS_CURVE, *HELD_OUT))
    if unknown := set(only) - {experiment.name for experiment in experiments}:
        raise click.BadParameter(f"no experiment {', '.join(sorted(unknown))}", param_hint="--only")
    chosen = [experiment for experiment in experiments if not only or experiment.name in only]
    store = Store(cache)
    if not finished:
        complete(chosen, store, jobs)
    write(chosen, store, out)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
