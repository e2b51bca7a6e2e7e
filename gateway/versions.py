"""The two versions of each model that has a canary, side by side: counted attempt by attempt, when requests end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.catalog import Canary
from gateway.errors import Fault
from gateway.exchange import Attempt, Exchange
from gateway.metrics import Counter, Family, Histogram
from gateway.reading import GAP_BOUNDS_S
from gateway.timeline import tpot_s
from policies.rollout import Interval, Times, excess, ratio, share

STABLE, CANARY = "stable", "canary"
LABELS = ("model", "version")


class Side:
    """What one version did since its canary is what it is. Clients that left are in neither number."""

    __slots__ = ("answered", "failed", "itl", "rejected", "ttft")

    def __init__(self) -> None:
        self.answered = 0
        self.failed = 0
        self.rejected = 0
        self.ttft = Times()
        self.itl = Times()  # one value for each stream: the gaps of one are no independent trials

    @property
    def attempts(self) -> int:
        return self.answered + self.failed + self.rejected

    def told(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "attempts": self.attempts,
            "failed": _interval(share(self.failed, self.attempts)),
            "rejected": _interval(share(self.rejected, self.attempts)),
            "ttft_s": self.ttft.typical_s,
            "itl_s": self.itl.typical_s,
        }


class Trial:
    """One canary at work."""

    __slots__ = ("canary", "sides", "since")

    def __init__(self, canary: Canary, since: float) -> None:
        self.canary = canary
        self.since = since
        self.sides = {STABLE: Side(), CANARY: Side()}

    def told(self, model: str) -> dict[str, Any]:
        """For the admin API: both sides, and what the canary has more or less of each measure."""
        canary, old, new = self.canary, self.sides[STABLE], self.sides[CANARY]
        excesses = {
            "failed": excess((new.failed, new.attempts), (old.failed, old.attempts)),
            "rejected": excess((new.rejected, new.attempts), (old.rejected, old.attempts)),
        }
        ratios = {"ttft": ratio(new.ttft, old.ttft), "itl": ratio(new.itl, old.itl)}
        return {
            "model": model,
            "pool": canary.pool or None,
            "backends": sorted(canary.backends),
            "weight": canary.weight,
            "sticky": "conversation" if canary.by_conversation else "tenant",
            "since": self.since,
            "versions": {name: side.told() for name, side in self.sides.items()},
            "difference": {name: _verdict(found, 0.0) for name, found in excesses.items()},
            "ratio": {name: _verdict(found, 1.0) for name, found in ratios.items()},
        }


class Versions:
    """All canaries. What was seen of one is forgotten when the configuration changes it: a comparison over two weights
    compares two times of the day, too. The metrics go on."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._trials: dict[str, Trial] = {}
        self.requests = Counter(
            "headrace_version_attempts_total",
            "Attempts of models with a canary, by version and what became of them.",
            *(*LABELS, "outcome"),
        )
        self.ttft = Histogram(
            "headrace_version_ttft_seconds",
            "From accept to the first token, where the first attempt gave it, by version.",
            *LABELS,
        )
        self.gaps = Histogram(
            "headrace_version_inter_token_seconds",
            "Gaps between tokens of streams, by version.",
            *LABELS,
            bounds=GAP_BOUNDS_S,
        )

    def __repr__(self) -> str:
        return f"<Versions of {', '.join(self._trials) or 'nothing'}>"

    def metrics(self) -> Iterator[Family]:
        """All of them."""
        yield from (self.requests, self.ttft, self.gaps)

    def configure(self, canaries: Mapping[str, Canary]) -> None:
        """These are the canaries now, by the labels of their models."""
        now, before = self._wall_clock(), self._trials
        self._trials = {
            model: before[model] if model in before and before[model].canary == canary else Trial(canary, now)
            for model, canary in canaries.items()
        }

    def told(self) -> list[dict[str, Any]]:
        """How each canary compares, for the admin API."""
        return [trial.told(model) for model, trial in self._trials.items()]

    def count(self, x: Exchange) -> None:
        """A request of a model with a canary has ended. One that began under another configuration than holds now is
        in the metrics only."""
        assert x.call is not None
        canary, model = x.call.canary, x.call.label
        trial = self._trials.get(model)
        for attempt in x.attempts:
            version = _version(canary, attempt, x)
            if not version or attempt.lost:
                continue
            word, fault = _ending(x, attempt)
            self.requests.values[(model, version, word)] += 1
            side = trial.sides[version] if trial is not None and trial.canary == canary else Side()
            side.failed += fault is Fault.BACKEND
            side.rejected += fault is Fault.CALLER
            side.answered += fault is Fault.NONE
            if attempt is x.attempts[-1]:
                self._time(x, side, (model, version))

    def _time(self, x: Exchange, side: Side, key: tuple[str, str]) -> None:
        if x.meter is None or x.ttft_s is None:
            return
        if len(x.attempts) == 1:
            self.ttft.child(key).observe(x.ttft_s)
            side.ttft.add(x.ttft_s)
        self.gaps.child(key).add(x.meter.gap_counts, x.meter.gap_sum)
        if not x.fault and (pace := tpot_s(x.meter)) is not None:
            side.itl.add(pace)


def _version(canary: Canary | None, attempt: Attempt, x: Exchange) -> str:
    """Which of the two an attempt was made on; neither for one in a pool that only stands in for them."""
    assert x.call is not None
    if canary is None or attempt.backend.pool not in (canary.pool, canary.stable):
        return ""
    new = attempt.backend.name in canary.backends or attempt.backend.pool == canary.pool
    return CANARY if new else STABLE


def _ending(x: Exchange, attempt: Attempt) -> tuple[str, Fault]:
    """What became of an attempt, and whose doing it was. One that did not fail ended as the request did."""
    return (attempt.failure, Fault.BACKEND) if attempt.failed else (x.outcome, x.fault)


def _interval(found: Interval) -> dict[str, float]:
    return {"estimate": found.estimate, "low": found.low, "high": found.high}


def _verdict(found: Interval | None, even: float) -> dict[str, Any]:
    """More of any measure is worse."""
    if found is None:
        return {"verdict": "too few"}
    verdict = "worse" if found.low > even else "better" if found.high < even else "no difference seen"
    return _interval(found) | {"verdict": verdict}
