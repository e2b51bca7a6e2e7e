"""What a proxy costs: CPU per request and per relayed chunk, latency it adds, memory it keeps; side by side in one run.

    python -m loadtests.overhead [--quick] [--json] [--arms nginx,headrace,...] [--rounds N] [--out DIR]

The proxy has one core to itself, the origin and the load generator share another. The arms take turns over several
rounds (A B C, A B C) in fresh processes; a figure is the median of its rounds. Only ratios within one run mean
anything: the absolute times are the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtests import machine, peers, phases, scoreboard
from loadtests.loadgen import Clock, LoadFailed
from loadtests.scoreboard import Row

DIRECT = "direct"
WIDTH = 160  # of the printed tables where no terminal says
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much: streams in the phases `streams`, `crowd` (0: left out) and `idle`."""

    rounds: int = 3
    json_s: float = 3.0
    stream_s: float = 4.0
    streams: int = 500
    crowd: int = 2000
    idle: int = 1000

    def slowed(self) -> Plan:
        """The same for an arm that manages a hundredth: fewer streams, so that they open at all."""
        return replace(self, streams=20, crowd=0, idle=50)


FULL = Plan()
QUICK = Plan(rounds=1, json_s=1.0, stream_s=1.5, crowd=0, idle=300)
MEMORY = ("unread", "idle")
Report = Callable[[str], None]
Phase = Callable[[phases.Rig], Awaitable[dict[str, float]]]


@dataclass(slots=True)
class Bench:
    """One run over the arms: `await Bench(...).run(report)`. The clock counts seconds."""

    arms: list[peers.Arm]
    plan: Plan
    cores: tuple[int, int]
    clock: Clock
    dir: Path

    def steps(self) -> int:
        return self.plan.rounds * (len(self.arms) + 1)

    async def run(self, report: Report) -> list[Row]:
        """All rounds. An arm that is missing or fails is named in its row and not tried again."""
        rows = {name: Row(name) for name in (DIRECT, *(arm.name for arm in self.arms))}
        for number in range(self.plan.rounds):
            for arm in (None, *self.arms):
                row = rows[arm.name if arm else DIRECT]
                report(f"round {number + 1}/{self.plan.rounds}: {row.name}")
                if not row.skipped:
                    await self.turn(row, arm)
        return list(rows.values())

    async def turn(self, row: Row, arm: peers.Arm | None) -> None:
        """One arm, one round. Memory first, in processes that are warm but not grown: later phases grow the heap,
        and what is idle then fits into the holes; so the unread clients get a process of their own."""
        plan = self.plan.slowed() if arm and arm.slow else self.plan
        unread: dict[str, Phase] = {"unread": phases.unread_memory}
        rest: dict[str, Phase] = {
            "idle": lambda rig: phases.idle_memory(rig, plan.idle),
            "json": lambda rig: phases.json_requests(rig, plan.json_s),
        }
        for name, number in (("streams", plan.streams), ("crowd", plan.crowd)):
            if number:
                rest[name] = partial(phases.streams, number=number, seconds=plan.stream_s)
        try:
            for group in (unread, rest):
                wanted = {name: phase for name, phase in group.items() if arm or name not in MEMORY}
                if wanted:
                    async with self.served(arm) as rig:
                        await self.measure(row, wanted, rig)
        except LoadFailed as failure:
            row.skipped = str(failure)

    async def measure(self, row: Row, wanted: dict[str, Phase], rig: phases.Rig) -> None:
        """The phases in turn, up to one that fails: the proxy is in no known state after it. It is not tried again."""
        for name, phase in wanted.items():
            if name in row.failed:
                continue
            try:
                row.add(name, await phase(rig))
            except LoadFailed as failure:
                row.failed[name] = str(failure)
                return

    @asynccontextmanager
    async def served(self, arm: peers.Arm | None) -> AsyncIterator[phases.Rig]:
        """A fresh origin and, before it, a fresh proxy. Raises LoadFailed where the arm cannot run."""
        others, own = self.cores
        dir_ = Path(tempfile.mkdtemp(dir=self.dir))
        port = peers.free_port()
        argv = [sys.executable, "-m", "loadtests.origin", "--port", str(port)]
        launch = peers.Launch(argv, {"PYTHONPATH": str(peers.ROOT)})
        log = dir_ / "origin.log"
        async with peers.running(launch, log, others) as origin:
            await peers.wait_ready(origin, port, self.clock, log)
            if arm is None:
                yield phases.Rig(self.clock, self.cores, port, port, origin.pid, None)
                return
            site = peers.Site(peers.free_port(), (port,), dir_)
            launch = arm.launch(site)
            log = dir_ / "proxy.log"
            async with peers.running(launch, log, own) as proxy:
                await peers.wait_ready(proxy, site.port, self.clock, log)
                yield phases.Rig(self.clock, self.cores, site.port, port, origin.pid, proxy.pid)


async def until_told(bench: Bench, report: Report) -> list[Row]:
    """Run; SIGTERM ends the run in order, so that no origin and no proxy is left behind."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await bench.run(report)


def chosen(names: str | None) -> list[peers.Arm]:
    """The arms of a comma-separated list; a name also stands for its variants (`smg` for `smg rr`, `smg cache`)."""
    known = peers.arms()
    if names is None:
        return known
    wanted = [name.strip() for name in names.split(",")]
    return [arm for arm in known if arm.name in wanted or arm.name.split()[0] in wanted]


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of direct, nginx and headrace")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else, on stdout")
    parser.add_argument("--arms", "--peers", help="comma-separated; default all that are installed")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--out", type=Path, help=f"where the table and the plot go (default {RESULTS}, --quick: nowhere)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parsed(argv)
    plan = QUICK if arguments.quick else FULL
    if arguments.rounds:
        plan = replace(plan, rounds=arguments.rounds)
    arms = chosen(arguments.arms or ("nginx,headrace" if arguments.quick else None))
    machine.allow_many_files()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    cores = machine.cores()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as dir_, machine.pinned(cores[0]):
        bench = Bench(arms, plan, cores, time.perf_counter, Path(dir_))
        with Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False) as progress:
            task = progress.add_task("", total=bench.steps())

            def report(step: str) -> None:
                progress.update(task, description=step, advance=1)
                progress.refresh()

            rows = uvloop.run(until_told(bench, report))
    if arguments.json:
        print(json.dumps([row.document() for row in rows], indent=2))
    else:
        scoreboard.show(rows, Console(width=None if sys.stdout.isatty() else WIDTH))
    if out := arguments.out or (None if arguments.quick else RESULTS):
        scoreboard.write(rows, out, peers.about(row.name for row in rows if not row.skipped))


if __name__ == "__main__":
    main()
