"""The command lines, in short forms that run in seconds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from click.testing import CliRunner

from loadtests import report, simulate
from loadtests.experiments import CURVES, EXPERIMENTS, FAIRNESS_CURVE, HELD_OUT, QUICK
from loadtests.report import Store


def test_simulate_prints_one_json_object() -> None:
    """Means by name, their intervals, the seeds and the scenario."""
    options = "--trace azure-chat --load 24 --policy headrace --seeds 2 --signal-delay 10ms --estimate-error 0.3"
    options += " --estimate-bias 1.25 --index approximate --non-streamed 0.3 --tenants 5 --chunk 8192 --gateways 2"
    result = CliRunner().invoke(simulate.main, [*options.split(), "--limit", "300", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"goodput", "goodput_tokens", "ttft_p50", "ttft_p99", "hit_rate", "rejected", "jain"} <= found.keys()
    assert found["seeds"] == [1, 2]
    assert found["scenario"]["signal_delay_s"] == 0.01
    assert 0.5 < found["goodput"] <= 1.0
    assert found["ci95"].keys() == found.keys() - {"ci95", "seeds", "scenario"}


def test_simulate_says_what_is_wrong() -> None:
    """Bad options end with code 2 and a line that names the value."""
    for options, message in (
        (["--trace", "nope"], "nope"),
        (["--signal-delay", "10 parsecs"], "'10 parsecs' is not a duration"),
        (["--non-streamed", "2"], "2"),
        (["--ablate", "everything"], "everything"),
    ):
        result = CliRunner().invoke(simulate.main, options)
        assert result.exit_code == 2
        assert message in result.output


def test_quick_evaluation_writes_tables_and_curves_and_resumes(tmp_path: Path) -> None:
    """Markdown, CSV and PNG; a second run simulates nothing; what is missing is run again."""
    options = ["--quick", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert CliRunner().invoke(report.main, options).exit_code == 0
    text = (tmp_path / "out" / "evaluation.md").read_text()
    assert "| goodput | conv 2.4 | synth 2 | azure 24 |" in text
    assert (tmp_path / "out" / "curve-quick.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "out" / "evaluation.csv").open() as file:
        records = list(csv.DictReader(file))
    assert {record["experiment"] for record in records} == {experiment.name for experiment in QUICK}
    assert all(record["difference"] == "0" for record in records if record["row"] == "headrace")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    gone = next(iter(kept))
    gone.unlink()
    assert CliRunner().invoke(report.main, options).exit_code == 0
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert again.keys() == kept.keys()
    assert {path for path, when in again.items() if when != kept[path]} == {gone}
    assert (tmp_path / "out" / "evaluation.md").read_text() == text


def test_every_experiment_is_well_formed(tmp_path: Path) -> None:
    """Scenarios can be made, names are unique, and every cell has its own place in the store."""
    experiments = [*EXPERIMENTS, *CURVES, FAIRNESS_CURVE, *HELD_OUT, *QUICK]
    assert len({experiment.name for experiment in experiments}) == len(experiments)
    cells = dict.fromkeys(cell for experiment in experiments for cell in experiment.cells())
    store = Store(tmp_path)
    assert len({store._path(cell) for cell in cells}) == len(cells)


def test_an_unknown_experiment_is_named() -> None:
    """`--only` takes names that exist."""
    result = CliRunner().invoke(report.main, ["--only", "nope"])
    assert result.exit_code == 2
    assert "no experiment nope" in result.output
