"""Faults at random under load, and what came of them: `python -m loadtests.chaos` (make chaos).

Four emulated backends that are found in DNS, each behind a relay that can misbehave, and a Valkey that counts the
limits, before one gateway. A seed decides what goes wrong, where, when and for how long; one backend is always left
alone, so that every request could have been served. Judged all the time: nobody is lied to, nobody is lost who could
have been served before his first byte, counts are never negative, nothing runs that nobody waits for; and at the end
everything has been given back and nothing has grown.

`--only kill --seconds 20` does one fault and judges how soon traffic stops and returns, and what the others notice;
`--only each` does every one, one after the other. `--all` kills all backends. `--soak` does no fault, and nothing may
grow. The exit code is 1 if a line was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random

from loadtests import outage
from loadtests.crowd import Crowd, Told
from loadtests.judgement import Judgement, at_share, deliver, progress
from loadtests.lag import SLOW_MS, Lag
from loadtests.profiles import PROFILES
from loadtests.stage import ENGINE, KEY, Size, Stage, stage, tracebacks
from loadtests.storm import Storm, kinds, requests_to

WARM_S = 5.0
CALM_S = 8.0  # after the last fault of a storm
SURGE, SURGE_S = 300, 0.5
WARMING = 0.25  # of a run, whatever it is: caches and histories fill
ENOUGH_S = 120.0  # below that nobody can tell growth from warming up
GROWN = {"chaos": 0.02, "soak": 0.01}
SPARE = 4  # tasks and descriptors more than before: a probe or a scrape is always under way somewhere


async def surge(here: Stage, seed: int) -> None:
    """More at once than will ever be again: what the allocator took for a peak it does not give back."""
    crowd = Crowd(here.api_port, SURGE / SURGE_S, Random(seed), KEY)
    await crowd.run(SURGE_S)
    await crowd.finish()
    for relay in here.relays:
        relay.posts.clear()


async def chaos(seconds: float, seed: int, rate: float) -> Judgement:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here, Lag() as lag:
            await surge(here, seed)
            crowd = Crowd(here.api_port, rate, Random(seed), KEY)
            storm = Storm(here, seed)
            sizes, left = [], []
            async with here.watched(lambda: len(crowd.going)):
                await crowd.run(WARM_S)
                for share in (WARMING, 1.0 - WARMING):
                    await asyncio.gather(crowd.run(seconds * share), storm.rage(seconds * share))
                    await crowd.run(CALM_S)
                    await crowd.finish()
                    left += await here.settled()
                    sizes.append(await here.size())
            judgement = Judgement(f"chaos, {seconds:g} s, seed {seed}")
            judge(judgement, here, crowd.told, storm, lag)
    judgement.none("left behind when nobody asked any more", left)
    judge_growth(judgement, sizes, GROWN["chaos"], seconds)
    judgement.facts |= {"seed": seed, "seconds": seconds, "faults": dict(storm.count)}
    return judgement


def judge(judgement: Judgement, here: Stage, told: Sequence[Told], storm: Storm, lag: Lag) -> None:
    """What the clients were told."""
    starved = lag.p99() > SLOW_MS
    failed = outage.lost(told)
    own = [each for each in failed if each.status == 500 and not each.reason]  # a backend's own word
    busy = [each for each in failed if each.reason == "gateway_busy" and starved]
    vanished = {number for relay in here.relays for number in relay.vanished}
    hung = [each for each in failed if each.status == 504 and each.id in vanished]
    dropped = [each for each in failed if not any(each in told for told in (own, busy, hung))]
    judgement.tell("requests", len(told))
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(storm.count.items()))
    judgement.tell("faults", sum(storm.count.values()), faults)
    judgement.tell("this machine: timers late by p99 (ms)", round(lag.p99(), 1))
    judgement.none("lost before the first byte", outage.words(dropped, here.tries()))
    judgement.tell("refused since this machine starved the gateway", len(busy))
    judgement.tell("told 504 where every packet had vanished", len(hung))
    judgement.tell("told a backend's own 500", len(own))
    judgement.tell("streams that broke, and said so", sum(1 for each in told if each.code == "error frame"))
    judgement.tell("clients that left", sum(1 for each in told if each.left))
    judgement.tell("attempts per request", round(requests_to(here.relays) / max(1, len(told)), 3))
    judgement.tell("retries left at the worst moment", round(here.retries, 1))
    times = outage.ttft(told)
    judgement.tell("TTFT p50, p99 (ms)", f"{at_share(times, 0.5) * 1e3:.0f}, {at_share(times, 0.99) * 1e3:.0f}")
    lies = [*here.lies, *(each.lie for each in told if each.lie), *tracebacks(here.log)]
    judgement.none("invariants that did not hold", lies)
    if dropped:
        judgement.facts["backends"] = [line for line in here.log.splitlines() if '"event":"backend"' in line]
        judgement.facts["lost"] = [asdict(each) for each in dropped]


def judge_growth(judgement: Judgement, sizes: list[Size], limit: float, seconds: float) -> None:
    """Between the first of the sizes and the last; each was taken when nobody asked."""
    first, last = sizes[0], sizes[-1]
    judgement.at_most("descriptors more than after warming up", last.descriptors - first.descriptors, SPARE)
    judgement.at_most("tasks more than after warming up", last.tasks - first.tasks, SPARE)
    grown = last.resident_bytes / first.resident_bytes - 1.0
    judgement.below("resident memory since warming up", grown, limit, "+%", judged=seconds >= ENOUGH_S)
    told = ", ".join(f"{size.resident_bytes / 2**20:.1f}" for size in sizes)
    judgement.tell("resident MiB, from the end of warming up on", told)


async def soak(seconds: float, seed: int, rate: float) -> Judgement:
    """A steady load. Nothing may have grown between a quarter of the time and its end."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here, Lag() as lag:
            await surge(here, seed)
            crowd = Crowd(here.api_port, rate, Random(seed), KEY)
            sizes, left, shares = [], [], []
            async with here.watched(lambda: len(crowd.going)):
                for _ in range(int(1.0 / WARMING)):
                    had_s = (await here.size()).cpu_s
                    await crowd.run(seconds * WARMING)
                    shares.append(((await here.size()).cpu_s - had_s) / (seconds * WARMING))
                    await crowd.finish()
                    left += await here.settled()
                    sizes.append(await here.size())
                    crowd.count()
            log = here.log
    judgement = Judgement(f"soak, {seconds:g} s, seed {seed}")
    judgement.tell("requests", crowd.sent)
    judgement.tell("share of a core that it had, quarter by quarter", ", ".join(f"{share:.0%}" for share in shares))
    busy = crowd.failed.pop("503 gateway_busy", 0) if lag.p99() > SLOW_MS else 0
    judgement.tell("this machine: timers late by p99 (ms)", round(lag.p99(), 1))
    judgement.tell("refused since this machine starved the gateway", busy)
    judgement.none("failed", [*crowd.failed.elements()])
    judgement.none("left behind when nobody asked any more", left)
    judge_growth(judgement, sizes, GROWN["soak"], seconds)
    judgement.none("invariants that did not hold", [*here.lies, *crowd.lies, *tracebacks(log)])
    return judgement


def planned(asked: argparse.Namespace) -> Iterator[tuple[str, float, Callable[[], Awaitable[Judgement]]]]:
    """Every run that was asked for: its name, about how long it takes, and what does it."""
    seconds, rate = asked.seconds, asked.rate
    for seed in asked.seeds:
        if asked.soak:
            yield f"soak, seed {seed}", seconds, partial(soak, seconds, seed, rate)
        elif asked.all:
            lasts_s = 2 * outage.AROUND_S + seconds
            yield f"all die, seed {seed}", lasts_s, partial(outage.all_die, seconds, seed, rate)
        elif asked.only:
            lasts_s = 2 * (outage.AROUND_S + seconds)
            single = partial(outage.single, engine=asked.engine)
            for kind in kinds() if asked.only == "each" else [asked.only]:
                yield f"{kind}, seed {seed}", lasts_s, partial(single, kind, seconds, seed, rate)
        else:
            yield f"chaos, seed {seed}", seconds + WARM_S + 2 * CALM_S, partial(chaos, seconds, seed, rate)


async def judged(asked: argparse.Namespace) -> list[Judgement]:
    """Run after run."""
    found = []
    for title, lasts_s, run in planned(asked):
        async with progress(title, lasts_s):
            found.append(await run())
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--soak", action="store_true", help="no faults; nothing may grow")
    parser.add_argument("--all", action="store_true", help="kill all backends")
    parser.add_argument("--only", choices=["each", *kinds()], metavar="FAULT", help=", ".join(["each", *kinds()]))
    parser.add_argument("--engine", choices=list(PROFILES), default=ENGINE, help="of the backends, with --only")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    asked = parser.parse_args()
    sys.exit(deliver(asyncio.run(judged(asked)), as_json=asked.json))


if __name__ == "__main__":
    main()
