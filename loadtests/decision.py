"""What a decision costs: submit + due on a pool of 64 backends with 1,000 jobs waiting and prompts of 100k tokens.

`python -m loadtests.decision` prints microseconds of CPU time at the median, the 99th percentile and the most, of one
submit + due and of one due that dispatches. Garbage collection is frozen out, as it would be by any long-lived server.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from time import process_time

import click

from policies.prefix import PIECE_BYTES, PrefixIndex, digests
from policies.scheduler import Scheduler
from policies.types import BackendView, ClassPolicy, Dispatch, Ending, Job, Usage

BYTES_PER_TOKEN = 4
PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN
KV_TOKENS = 1_000_000  # of each backend


class Pool:
    """A pool in full flow: each backend computes one prompt after the other, and streams its answers meanwhile."""

    def __init__(self, backends: int, waiting: int, prompt_tokens: int, tenants: int, seed: int) -> None:
        self.rng = Random(seed)
        self.waiting = waiting
        self.prompt_tokens = prompt_tokens
        self.tenants = tenants
        self.now = 0.0
        self.ids = count(1)
        self.streams: dict[str, deque[int]] = {}
        self.jobs: dict[int, Job] = {}
        interactive = ClassPolicy("interactive", 10 * waiting, 10 * waiting * prompt_tokens, 1.0, max_wait_s=1e6)
        self.scheduler = Scheduler(Random(seed), classes=[interactive])
        self.scheduler.observe([BackendView(f"b{i}", kv_tokens=KV_TOKENS) for i in range(backends)], 0.0)
        shared = self.rng.randbytes(4 * PIECE_BYTES)
        self.documents = [
            shared + self.rng.randbytes(BYTES_PER_TOKEN * prompt_tokens // 2) for _ in range(waiting // 4)
        ]

    def job(self) -> Job:
        """Half of each prompt is a document that others ask about too, all begin alike, and lengths vary."""
        tokens = int(self.prompt_tokens * self.rng.uniform(0.5, 1.0))
        document = self.rng.choice(self.documents)
        body = document + self.rng.randbytes(max(0, BYTES_PER_TOKEN * tokens - len(document)))
        return Job(
            next(self.ids),
            f"t{self.rng.randrange(self.tenants)}",
            self.now,
            prompt_tokens=tokens,
            output_tokens=300,
            prefix=digests([body], 7),
            deadline=self.now + 1e6,
        )

    def happen(self) -> None:
        """Some backend ends a prefill, its oldest answer ends, and its streams go on."""
        self.now += 0.01
        name = self.rng.choice(list(self.streams))
        running = self.streams[name]
        self.scheduler.first_token(running[-1], self.now)
        if len(running) > 8:
            done = running.popleft()
            job = self.jobs.pop(done)
            self.scheduler.leave(done, self.now, Ending.SUCCESS, Usage(job.prompt_tokens, 300, 0))
        self.now += 0.01
        self.scheduler.tokens(running[-1], 1000 * len(running), self.now)

    def take(self, found: list[object]) -> int:
        """Run what was dispatched; returns how many."""
        taken = 0
        for action in found:
            if isinstance(action, Dispatch):
                self.streams.setdefault(action.backend, deque()).append(action.job.id)
                self.jobs[action.job.id] = action.job
                taken += 1
        return taken

    def fill(self) -> None:
        """Dispatch to all backends and queue the rest."""
        while len(self.jobs) < len(self.scheduler.statistics(self.now).backends) + self.waiting:
            job = self.job()
            self.jobs[job.id] = job
            self.scheduler.submit(job, self.now)
            self.take(list(self.scheduler.due(self.now)))


def timed(act: Callable[[], object], clock: Callable[[], float]) -> tuple[float, object]:
    """Seconds that it took, and what it returned."""
    start = clock()
    result = act()
    return clock() - start, result


def measure(pool: Pool, rounds: int) -> tuple[list[float], list[float]]:
    """Times of submit + due, and of a due that dispatches, in microseconds, sorted."""
    submits: list[float] = []
    dispatches: list[float] = []
    for _ in range(rounds):
        pool.happen()
        spent, found = timed(lambda: pool.scheduler.due(pool.now), process_time)
        assert isinstance(found, list)
        if pool.take(found):
            dispatches.append(spent * 1e6)
        job = pool.job()
        pool.jobs[job.id] = job

        def decide(job: Job = job) -> object:
            pool.scheduler.submit(job, pool.now)
            return pool.scheduler.due(pool.now)

        spent, found = timed(decide, process_time)
        assert isinstance(found, list)
        pool.take(found)
        submits.append(spent * 1e6)
    return sorted(submits), sorted(dispatches)


@click.command()
@click.option("--backends", default=64, show_default=True)
@click.option("--waiting", default=1000, show_default=True)
@click.option("--prompt-tokens", default=100_000, show_default=True)
@click.option("--tenants", default=50, show_default=True)
@click.option("--rounds", default=3000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A file to write the same to, in Markdown.")
def main(
    backends: int, waiting: int, prompt_tokens: int, tenants: int, rounds: int, seed: int, out: Path | None
) -> None:
    """Print what a decision costs."""
    pool = Pool(backends, waiting, prompt_tokens, tenants, seed)
    pool.fill()
    gc.collect()
    gc.freeze()
    submits, dispatches = measure(pool, rounds)
    lines = [f"{backends} backends, {waiting} waiting, prompts of up to {prompt_tokens} tokens, {tenants} tenants"]
    for name, times in (("submit + due", submits), ("due that dispatches", dispatches)):
        middle, tail = times[len(times) // 2], times[len(times) * 99 // 100]
        lines.append(f"{name:20} {middle:6.0f} us median {tail:6.0f} us p99 {times[-1]:6.0f} us most of {len(times)}")
    held = pool.scheduler.statistics(pool.now).index_pieces
    most = int(backends * KV_TOKENS * pool.scheduler.rules.index_share / PIECE_TOKENS)
    size = f"at most {most} pieces and {most * PrefixIndex.BYTES_PER_PIECE / 2**20:.0f} MiB"
    lines.append(f"index: {held} pieces; {size} for {backends} backends of {KV_TOKENS} KV tokens")
    print("\n".join(lines))
    if out:
        text = "\n".join(lines)
        out.write_text(
            f"# What a decision costs\n\n`python -m loadtests.decision`, CPU time of one core:\n\n```\n{text}\n```\n"
        )


if __name__ == "__main__":
    main()
