"""Pictures of the dashboards, drawn by ourselves from the queries of their panels, for docs/dashboards.md.

    python -m deploy.grafana.pictures [--minutes 3] [--to docs/images]

Runs the stack (deploy/stack.py) under a load; after half of the time one of the two engines stands still for a while.
Then every query of every panel is asked of its Prometheus, with all variables at "all". Takes the time that it is told,
and a minute; needs what `make stack` needs.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from deploy.grafana.build import DIR
from deploy.grafana.drawing import Course, picture
from deploy.grafana.drawing import number as read
from deploy.stack import COMPOSE, MODEL, ROOT, Stack, raised

IMAGES = ROOT / "docs" / "images"
POINTS = 120
STALL_S = 20.0
WARM_S = 25.0  # before the first point: rates need a past
INTERVAL = "15s"
CAPTION = (
    "Our own drawing of the panels' queries, not Grafana's: {minutes:g} minutes of the stack under {rate:g} requests a "
    "second; from minute {at:g} on backend-1 stands still for {stall:g} s."
)


def plain(expr: str) -> str:
    """With what Grafana would put in."""
    return re.sub(r"\$\w+", ".*", expr.replace("$__rate_interval", INTERVAL))


@contextmanager
def loaded(up: Stack, rate: float, folder: Path) -> Iterator[None]:
    """More than the little load of the stack."""
    command = [
        sys.executable,
        "-m",
        "loadtests.trickle",
        up.api,
        "--model",
        MODEL,
        "--rate",
        f"{rate:g}",
        "--seed",
        "2",
    ]
    with (folder / "more-load.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 (this interpreter, a module of ours)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def live_through(up: Stack, seconds: float) -> float:
    """The scene; returns when it began, in seconds since the epoch."""
    time.sleep(WARM_S)  # rates need a history before the scene begins
    began_at = time.time()
    time.sleep(seconds / 2)  # the scene is made of time: load, a stall, load
    engine = up.processes["backend-1"]
    engine.send_signal(signal.SIGSTOP)
    try:
        time.sleep(STALL_S)  # so long the engine stands still in the pictures
    finally:
        engine.send_signal(signal.SIGCONT)
    time.sleep(max(0.0, began_at + seconds - time.time()))  # until its end, however long the signals took
    return began_at


class Questions:
    """Asks a Prometheus about a time. `names` are the addresses of the stack, each by what stands there."""

    def __init__(self, url: str, began_at: float, seconds: float, names: Mapping[str, str]) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self._names = names
        self._began_at = began_at
        self._times = {"start": began_at, "end": began_at + seconds, "step": seconds / POINTS}

    def panel(self, panel: Mapping[str, Any]) -> list[Course]:
        """All lines of a panel."""
        return [course for target in panel.get("targets", ()) for course in self._courses(target)]

    def _courses(self, target: Mapping[str, Any]) -> Iterator[Course]:
        for found in self._asked("query_range", self._times | {"query": plain(target["expr"])})["result"]:
            times = [(float(at) - self._began_at) / 60 for at, _ in found["values"]]
            values = [read(value) for _, value in found["values"]]
            if any(value == value for value in values):
                yield Course(self._called(target.get("legendFormat", ""), found["metric"]), times, values)

    def _called(self, legend: str, labels: Mapping[str, str]) -> str:
        if legend in ("", "__auto"):
            text = " ".join(value for name, value in labels.items() if name not in ("__name__", "job"))
        else:
            text = re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)
        for address, name in self._names.items():
            text = text.replace(f"http://{address}", name).replace(address, name)
        return re.sub(r"http://127\.0\.0\.1:\d+", "elsewhere", " ".join(text.split()))

    def _asked(self, what: str, told: Mapping[str, Any]) -> Any:
        answer = self._http.get(f"/api/v1/{what}", params=dict(told)).json()
        assert answer["status"] == "success", answer
        return answer["data"]


def named(folder: Path) -> dict[str, str]:
    """The targets of the stack's Prometheus: the places are those of deploy/compose, in the same order."""
    here, there = (
        [
            target
            for job in yaml.safe_load((place / "prometheus.yml").read_text())["scrape_configs"]
            for each in job["static_configs"]
            for target in each["targets"]
        ]
        for place in (folder, COMPOSE)
    )
    return {address: name.partition(":")[0] for address, name in zip(here, there, strict=True)}


def main(minutes: float, rate: float, folder: Path) -> None:
    """Writes a picture for each dashboard."""
    seconds = minutes * 60
    with TemporaryDirectory(prefix="headrace-pictures-") as place, ExitStack() as stack:
        up = raised(stack, Path(place))
        stack.enter_context(loaded(up, rate, Path(place)))
        questions = Questions(up.prometheus, live_through(up, seconds), seconds, named(Path(place)))
        caption = CAPTION.format(minutes=minutes, rate=rate, stall=STALL_S, at=minutes / 2)
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(DIR.glob("*.json")):
            board = json.loads(path.read_text())
            found = {panel["id"]: questions.panel(panel) for panel in board["panels"]}
            picture(board, found, minutes, caption, folder / f"dashboard-{path.stem.removeprefix('headrace-')}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second, beside the stack's own 3")
    parser.add_argument("--to", type=Path, default=IMAGES)
    asked = parser.parse_args()
    main(asked.minutes, asked.rate, asked.to)
