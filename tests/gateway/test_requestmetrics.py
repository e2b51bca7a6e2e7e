"""What is counted of requests, as far as no process is needed to see it."""

from __future__ import annotations

from gateway.backend import Backend
from gateway.errors import ClientGone, Phase, UpstreamFailed
from gateway.exchange import Attempt, Call, Dialect, Endpoint, Exchange, Tally
from gateway.exposition import TEXT, exposed
from gateway.metrics import Numbers
from gateway.reading import BodyMeter
from gateway.requestmetrics import PoolMetrics, RequestMetrics
from gateway.timeline import Objective
from policies.types import Dispatch, Job, Usage, Wait

CHAT = Endpoint("/v1/chat/completions", Dialect.CHAT, generates=True)


def exchange(url: str, decision: Dispatch | None = None, failure: str = "") -> Exchange:
    """One that was dispatched to a backend of pool `p`."""
    x = Exchange("r", 100.0, CHAT, call=Call(CHAT, "m", "m", "p", []), queued_at=100.1)
    backend = Backend(url, "p", "b", 80, b"b")
    attempt = Attempt(backend, decision or Dispatch(Job(1, "t", 0.0), url), 100.2, lambda now: None, Tally())
    attempt.connected_at, attempt.ended_at, attempt.failure, attempt.failed = 100.2, 100.5, failure, bool(failure)
    x.attempts.append(attempt)
    x.end(100.5, UpstreamFailed("no", Phase.SENT) if failure else None)
    return x


def test_b142_series_of_backends_that_are_gone_disappear() -> None:
    """Fifty come, fail and go; the two that stay are still told of, and nothing is kept of the others."""
    metrics = PoolMetrics()
    for number in range(50):
        metrics.count(exchange(f"http://b{number}", failure="upstream_error"), None, 0.0)
    everybody = {("p", f"http://b{number}") for number in range(50)}
    assert exposed(metrics.metrics(everybody), TEXT).count(b"headrace_upstream_failures_total{") == 50
    alive = {("p", "http://b0"), ("p", "http://b1")}
    page = exposed(metrics.metrics(alive), TEXT).decode()
    assert page.count("headrace_upstream_failures_total{") == 2 and 'backend="http://b1"' in page
    assert len(metrics.failures.values) == len(metrics.failures.texts) == 2


def test_an_attempt_that_its_client_gave_up_is_no_failure_of_its_backend() -> None:
    """It is told of among those who left."""
    metrics = PoolMetrics()
    x = exchange("http://b", failure="cancelled")
    x.attempts[0].failed = False
    x.end(100.5, ClientGone())
    metrics.count(x, None, 0.0)
    assert not metrics.failures.values


def test_dispatches_are_told_by_what_they_did_for_the_cache() -> None:
    """The warmest backend, a wait for it, a colder one, or nobody knows the prompt."""
    metrics = PoolMetrics()
    job = Job(1, "t", 0.0)
    for decision in (
        Dispatch(job, "u", cached_tokens=500),
        Dispatch(job, "u", cached_tokens=500, waited_for=Wait.WARM),
        Dispatch(job, "u", cached_tokens=100, missed_tokens=400),
        Dispatch(job, "u", waited_for=Wait.TURN),
    ):
        metrics.count(exchange("u", decision), None, 0.0)
    assert metrics.affinity.values == {("p", result): 1 for result in ("hit", "wait", "spill", "cold")}


def test_predicted_prefixes_are_counted_where_the_engine_says_what_it_found() -> None:
    """Otherwise what was found would look like less than it was."""
    metrics = PoolMetrics()
    decision = Dispatch(Job(1, "t", 0.0), "u", cached_tokens=500)
    for usage in (Usage(1000, 5, 400), Usage(1000, 5, None), None):
        x = exchange("u", decision)
        x.meter = BodyMeter(Dialect.CHAT)
        metrics.count(x, usage, 0.0)
    counted = [dict(family.values) for family in (metrics.predicted, metrics.confirmed, metrics.prompt)]
    assert counted == [{("p",): 500}, {("p",): 400}, {("p",): 1000}]


def test_objectives_begin_at_nothing() -> None:
    """A rate of misses exists before the first miss; objectives that a model does not have are not told."""
    metrics = RequestMetrics()
    metrics.begin({"m": Objective(ttft_s=1.0), "n": Objective()}, ["interactive", "batch"])
    family = next(each for each in metrics.metrics() if each.name == "headrace_objectives_total")
    assert isinstance(family, Numbers)
    told = {(model, objective) for model, _, objective, _ in family.values}
    assert told == {("m", "availability"), ("m", "ttft"), ("n", "availability")}
    assert set(family.values.values()) == {0} and len(family.values) == 3 * 2 * 2
