"""What the metrics of a window say of a gateway's work, as numbers; None is what they do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

from gateway.samples import Window

PATIENT = "batch"  # its times are nobody's objective
CAPACITY = ("queue_full", "queue_timeout", "deadline_unreachable")
ATTEMPTS = ("headrace_affinity_total", "headrace_retries_total", "headrace_hedges_total")
PARTS = ("gateway", "queue", "connect", "backend")


@dataclass(frozen=True, slots=True)
class Objective:
    """One promise to one model: its bound in seconds (None where it is not told), and how many requests kept it."""

    model: str
    name: str
    bound_s: float | None
    met: float
    missed: float

    @property
    def share(self) -> float | None:
        """Of the requests that kept it."""
        judged = self.met + self.missed
        return self.met / judged if judged else None


@dataclass(frozen=True, slots=True)
class Facts:
    """Seconds, tokens, shares of one, and counts within the window; gauges are as of its end. `missed` is the share of
    the judged requests that were not good, by cause; `parts` the mean seconds of what first tokens took. `whole`:
    something is known of the window's beginning."""

    seconds: float
    whole: bool
    requests: float
    outcomes: dict[str, float]
    models: dict[str, float]
    classes: dict[str, float]
    tenants: dict[str, float]
    prompt_tokens: float | None
    output_tokens: float | None
    output_rate: float
    in_flight: float
    queued: float
    objectives: tuple[Objective, ...]
    judged: float
    missed: dict[str, float]
    ttft_s: dict[str, float | None]
    itl_s: dict[str, float | None]
    parts: dict[str, float]
    refused: dict[str, float]
    failures: dict[str, float]
    attempts: float
    states: dict[str, int]
    expected_tokens: float
    found_share: float | None
    cached_share: float | None
    prefill_rate: float | None
    kv_share: float | None
    engine_running: float | None
    engine_waiting: float | None
    backends: int
    loop_lag_s: float | None
    cores: float | None
    limiter: tuple[str, ...]
    signal_age_s: float | None

    @property
    def goodput(self) -> float | None:
        """Share of the judged requests that were good."""
        return 1.0 - sum(self.missed.values()) if self.judged else None

    @property
    def overloaded(self) -> float:
        """Share of the requests that were refused for want of room."""
        return sum(self.refused.get(reason, 0.0) for reason in CAPACITY) / self.requests if self.requests else 0.0

    def part(self, name: str) -> float:
        """The share of one part in the mean time to the first token."""
        total = sum(self.parts.values())
        return self.parts.get(name, 0.0) / total if total else 0.0

    def kept(self, name: str) -> float | None:
        """The share of requests that kept one kind of objective, all models together; None where there is none."""
        told = [each for each in self.objectives if each.name == name]
        judged = sum(each.met + each.missed for each in told)
        return sum(each.met for each in told) / judged if judged else None

    def bound_s(self, name: str) -> float | None:
        """The strictest bound of one kind of objective."""
        return min((each.bound_s for each in self.objectives if each.name == name and each.bound_s), default=None)


def facts(now: Window) -> Facts:
    """All of them."""
    watched = set(now.labels("headrace_requests_total", "class")) - {PATIENT}
    good = now.increase("headrace_goodput_total")
    misses = now.increases("headrace_slo_misses_total", "cause")
    judged = good + sum(misses.values())
    requests = now.increase("headrace_requests_total")
    prompt, output = (now.increase("headrace_tokens_total", direction=each) for each in ("input", "output"))
    answered = now.increase("headrace_request_seconds_count")
    expected, found, all_prompt = (
        now.increase(f"headrace_prefix_{each}_tokens_total") for each in ("predicted", "confirmed", "prompt")
    )
    states = Counter(state for *_, state in now.distinct("headrace_backend_state", "pool", "backend", "state"))
    backends = now.distinct("headrace_backend_state", "pool", "backend")
    return Facts(
        seconds=now.seconds,
        whole="headrace_build_info" in now.first,
        requests=requests,
        outcomes=now.increases("headrace_requests_total", "outcome"),
        models=now.increases("headrace_requests_total", "model"),
        classes=now.increases("headrace_requests_total", "class"),
        tenants=now.increases("headrace_requests_total", "tenant"),
        prompt_tokens=prompt / answered if answered and prompt else None,
        output_tokens=output / answered if answered and output else None,
        output_rate=output / now.seconds,
        in_flight=sum(now.gauges("headrace_in_flight_requests")),
        queued=sum(now.gauges("headrace_queued_requests")),
        objectives=tuple(_objectives(now, watched)),
        judged=judged,
        missed={cause: number / judged for cause, number in misses.items()},
        ttft_s=_quantiles(now, "headrace_ttft_seconds", watched),
        itl_s=_quantiles(now, "headrace_inter_token_seconds", watched),
        parts={
            part: mean
            for part in PARTS
            if (mean := now.mean("headrace_ttft_part_seconds", part=part, **{"class": watched})) is not None
        },
        refused=now.increases("headrace_refusals_total", "reason"),
        failures=now.increases("headrace_upstream_failures_total", "reason"),
        attempts=sum(map(now.increase, ATTEMPTS)),
        states=dict(states.most_common()),
        expected_tokens=expected,
        found_share=found / expected if expected else None,
        cached_share=found / all_prompt if all_prompt else None,
        prefill_rate=_mean(now.gauges("headrace_prefill_tokens_per_second")),
        kv_share=max(now.gauges("headrace_engine_kv_ratio"), default=None),
        engine_running=_mean(now.gauges("headrace_engine_running_requests")),
        engine_waiting=_mean(now.gauges("headrace_engine_waiting_requests")),
        backends=len(backends),
        loop_lag_s=now.quantile("headrace_loop_lag_seconds", 0.99),
        cores=_cores(now),
        limiter=tuple(mode for mode, on in now.labels("headrace_limiter_mode", "mode").items() if on),
        signal_age_s=max(now.gauges("headrace_signal_age_seconds"), default=None),
    )


def _objectives(now: Window, watched: Set[str]) -> Iterable[Objective]:
    bounds = {
        (dict(labels)["model"], dict(labels)["objective"]): value
        for labels, value in now.last.get("headrace_objective_seconds", {}).items()
    }
    told = now.last.get("headrace_objectives_total", {})
    for model, name in sorted({(dict(labels)["model"], dict(labels)["objective"]) for labels in told}):
        counts = now.increases("headrace_objectives_total", "result", model=model, objective=name, **{"class": watched})
        yield Objective(model, name, bounds.get((model, name)), counts.get("met", 0.0), counts.get("missed", 0.0))


def _quantiles(now: Window, name: str, watched: Set[str]) -> dict[str, float | None]:
    return {f"p{round(share * 100)}": now.quantile(name, share, **{"class": watched}) for share in (0.5, 0.95, 0.99)}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cores(now: Window) -> float | None:
    """Processor cores that one gateway process used, on average: it has one event loop, so one is all it can use.
    Workers of one machine tell of their time together."""
    workers = now.gauges("headrace_workers")
    processes = len(now.last.get("process_cpu_seconds_total", {})) - len(workers) + sum(workers)
    return now.increase("process_cpu_seconds_total") / now.seconds / processes if processes else None
