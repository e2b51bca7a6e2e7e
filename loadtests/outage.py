"""One thing goes wrong under load, and what everybody else has to bear; or all backends die, and the first returns."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random

from loadtests.crowd import Crowd, Told
from loadtests.faultrelay import FaultRelay, Weather
from loadtests.judgement import Judgement, at_share
from loadtests.lag import Lag
from loadtests.stage import ENGINE, KEY, stage, tracebacks
from loadtests.storm import Fault, fault

AROUND_S = 10.0  # of load before everything, and after all is well again
SOON_S, RETURN_S = 2.0, 5.0
SHARE = 0.02  # of the requests: a trial each few seconds, where a quarter went before
SERVED, ATTEMPTS, RISE = 0.001, 1.1, 1.5
REFUSED_S, RECOVERY_S = 0.1, 3.0
ENOUGH = 200  # requests whose p99 is worth a word


@dataclass(frozen=True)
class Seen:
    """One outage, as the clients and the backends saw it. Times are monotonic seconds."""

    told: Sequence[Told]
    relays: Sequence[FaultRelay]
    lag: Lag
    struck: float
    healed: float

    @property
    def bad(self) -> FaultRelay:
        return self.relays[0]

    def between(self, begin: float, end: float) -> list[Told]:
        """Who came then."""
        return [each for each in self.told if begin <= each.sent_at < end]

    def hits(self, begin: float, end: float) -> list[float]:
        """When requests reached the bad one."""
        return [post.at for post in self.bad.posts if begin <= post.at < end]

    def others(self, told: Sequence[Told]) -> list[float]:
        """First-token times of those that never were at the bad one."""
        hit = {post.id for post in self.bad.posts}
        return ttft([each for each in told if each.id not in hit])

    def struck_ones(self, told: Sequence[Told]) -> list[float]:
        """The same of those that were there first, and were served all the same."""
        hit = {post.id for post in self.bad.posts}
        return ttft([each for each in told if each.id in hit])


def ttft(told: Sequence[Told]) -> list[float]:
    """Of the streams that got a token, in seconds."""
    return [each.first_at - each.sent_at for each in told if each.begun]


def lost(told: Sequence[Told]) -> list[Told]:
    """Who was refused or failed before the first byte."""
    return [each for each in told if not each.left and each.status != 200]


def words(told: Sequence[Told], tries: Mapping[str, int] | None = None) -> list[str]:
    """How each was refused, and after how many backends."""
    after = {} if tries is None else {each.id: f" after {tries.get(each.id, '?')} backends" for each in told}
    return [f"{each.status} {each.reason or 'by the backend'}{after.get(each.id, '')}" for each in told]


async def single(
    kind: str, seconds: float, seed: int, rate: float, around_s: float = AROUND_S, engine: str = ENGINE
) -> Judgement:
    """One fault, for so long, after as long without one; before that and afterwards the load goes on for `around_s`."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder), engine=engine) as here, Lag() as lag:
            crowd = Crowd(here.api_port, rate, Random(seed), KEY, leave=0.0)
            what = fault(here, kind)
            await crowd.run(around_s + seconds)
            struck = time.monotonic()
            await what.strike()
            await crowd.run(seconds)
            healed = time.monotonic()
            await what.heal()
            await crowd.run(around_s)
            await crowd.finish()
            lies = [each.lie for each in crowd.told if each.lie] + await here.settled()
            lies += [*here.lies, *tracebacks(here.log)]
    judgement = Judgement(f"{kind} of {engine}, for {seconds:g} s, seed {seed}")
    judge(judgement, what, Seen(crowd.told, here.relays, lag, struck, healed))
    judgement.none("invariants that did not hold", lies)
    return judgement


def judge(judgement: Judgement, what: Fault, seen: Seen) -> None:
    """Every promise about one fault."""
    seconds = seen.healed - seen.struck
    before = seen.between(seen.struck - seconds, seen.struck - 0.5)
    during = seen.between(seen.struck - 0.5, seen.healed)
    failed = lost(during)
    judgement.tell("requests while it lasted", len(during))
    judgement.at_most(
        "failed before the first byte", len(failed), max(1, int(SERVED * len(during))), why="; ".join(words(failed))
    )
    judgement.tell("streams that broke, and said so", sum(1 for each in during if each.code == "error frame"))
    posts = [post for relay in seen.relays for post in relay.posts if seen.struck - seconds <= post.at < seen.healed]
    judgement.at_most("attempts per request", len(posts) / max(1, len(before) + len(during)), ATTEMPTS, "x")
    quiet, now = seen.others(before), seen.others(during)
    half = len(quiet) // 2
    enough = min(len(quiet), len(now)) >= ENOUGH
    lags = seen.lag.p99(seen.struck - seconds, seen.struck), seen.lag.p99(seen.struck, seen.healed)
    judgement.tell("this machine: timers late by p99, before and while (ms)", f"{lags[0]:.1f}, {lags[1]:.1f}")
    judgement.tell("p99 TTFT without the fault, later half against the earlier", ratio(quiet[half:], quiet[:half]))
    judgement.tell("p50 TTFT of the others, against before", ratio(now, quiet, 0.5))
    judgement.below("p99 TTFT of the others, against before", ratio(now, quiet), RISE, "x", judged=enough)
    caught = seen.struck_ones(during)
    judgement.tell("of those it caught: served elsewhere after, at worst (s)", max(caught, default=0.0))
    if what.shuns:
        shunned(judgement, seen, len(during))


def ratio(now: Sequence[float], before: Sequence[float], share: float = 0.99) -> float:
    """Of a quantile."""
    return round(at_share(now, share) / max(1e-9, at_share(before, share)), 3)


def shunned(judgement: Judgement, seen: Seen, requests: int) -> None:
    """Requests stop going there, and go there again."""
    hits = seen.hits(seen.struck + SOON_S, seen.healed)
    since_s = max(0.1, seen.healed - seen.struck - SOON_S)
    share = len(hits) / max(1.0, requests * since_s / (seen.healed - seen.struck))
    judgement.below("share of the requests that go there later than 2 s", share, SHARE, "%")
    back = min(seen.hits(seen.healed, inf), default=inf) - seen.healed
    judgement.below("a request goes there again after", back, RETURN_S, "s")


async def all_die(seconds: float, seed: int, rate: float, around_s: float = AROUND_S) -> Judgement:
    """All backends are killed; then the first one returns."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as here:
            crowd = Crowd(here.api_port, rate, Random(seed), KEY, leave=0.0)
            await crowd.run(around_s)
            struck = time.monotonic()
            for relay in here.relays:
                await relay.turn(Weather.KILL)
            await crowd.run(seconds)
            healed = time.monotonic()
            await here.relays[0].turn(Weather.FAIR)
            await crowd.run(around_s)
            await crowd.finish()
            lies = [each.lie for each in crowd.told if each.lie] + await here.settled() + [*tracebacks(here.log)]
    judgement = Judgement(f"all backends die, for {seconds:g} s, seed {seed}")
    unserved = [each for each in crowd.told if struck <= each.sent_at < healed and not (each.begun or each.whole)]
    known = [each for each in unserved if each.sent_at > struck + SOON_S]
    told = Counter(words(unserved))
    judgement.tell(
        "not served while they were dead", len(unserved), ", ".join(f"{n} x {how}" for how, n in told.items())
    )
    judgement.none("later than 2 s: other than 503 no_backend", [w for w in words(known) if w != "503 no_backend"])
    took = [each.ended_at - each.sent_at for each in known]
    judgement.below("  and refused within, p99", at_share(took, 0.99), REFUSED_S, "s")
    late = [each.ended_at - each.sent_at for each in unserved if each.sent_at <= struck + SOON_S]
    judgement.tell("told so in the first 2 s after, at worst (s)", max(late, default=0.0))
    served = min((each.first_at for each in crowd.told if each.whole and each.first_at > healed), default=inf)
    judgement.below("served again after the first was back", served - healed, RECOVERY_S, "s")
    judgement.none("invariants that did not hold", lies)
    return judgement
