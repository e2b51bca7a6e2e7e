"""Where the time of a request went, and whether it was good."""

from __future__ import annotations

import pytest

from gateway.backend import Backend
from gateway.errors import NO_BACKEND, ClientGone, Fault, GatewayError, Phase, Unavailable, UpstreamFailed
from gateway.exchange import Attempt, Call, Dialect, Endpoint, Exchange, Tally
from gateway.reading import Reading
from gateway.timeline import Cause, Objective, Parts, parts, phase, tpot_s, verdict
from policies.types import Dispatch, Job

CHAT = Endpoint("/v1/chat/completions", Dialect.CHAT, generates=True)
GOAL = Objective(ttft_s=1.0, itl_s=0.05)


class Scripted(Reading):
    """A meter that saw tokens at these times."""

    def __init__(self, *times: float) -> None:
        super().__init__(Dialect.CHAT)
        for at in times:
            self.tokens += 1
            self._came(1, at)


def attempt(dispatched: float, connected: float, ended: float, failure: str = "") -> Attempt:
    backend = Backend("http://b", "p", "b", 80, b"b")
    told = Attempt(backend, Dispatch(Job(1, "t", 0.0), "http://b"), dispatched, lambda now: None, Tally())
    told.connected_at, told.ended_at, told.failure, told.failed = connected, ended, failure, bool(failure)
    return told


def exchange(*attempts: Attempt, meter: Reading | None = None, ended: float = 9.0) -> Exchange:
    x = Exchange("r", 100.0, CHAT, call=Call(CHAT, "m", "m", "p", [], stream=True), queued_at=100.1)
    x.attempts = list(attempts)
    x.meter = meter
    x.status = 200 if meter else 0
    x.ended_at = ended
    x.outcome = "ok"
    return x


def test_parts_add_up_to_the_first_token() -> None:
    """Reading 0.1, queue 0.4, connect 0.2, backend 0.3: one second."""
    x = exchange(attempt(100.5, 100.7, 103.0), meter=Scripted(101.0, 102.0), ended=103.0)
    assert parts(x) == pytest.approx(Parts(0.1, 0.4, 0.2, 0.3))


def test_parts_of_a_second_try_count_both_backends() -> None:
    """The failed attempt's time is its backend's and not the gateway's; the pause after it is waiting."""
    failed, good = attempt(100.1, 100.2, 100.6, "upstream_error"), attempt(100.7, 100.7, 102.0)
    x = exchange(failed, good, meter=Scripted(101.0, 101.5), ended=102.0)
    assert parts(x) == pytest.approx(Parts(0.1, 0.1, 0.1, 0.7))


def test_the_time_of_two_attempts_at_once_counts_once() -> None:
    """The first is slow from 100.1 to 100.8; the second begins at 100.5 and brings the first token at 100.8. Which of
    the two it was that lost makes no difference to where the time went."""
    slow, fast = attempt(100.1, 100.2, 100.8), attempt(100.5, 100.6, 102.0)
    slow.lost, fast.hedge, fast.number = True, True, 2
    x = exchange(slow, fast, meter=Scripted(100.8, 101.5), ended=102.0)
    assert parts(x) == pytest.approx(Parts(0.1, 0.0, 0.1, 0.6))
    slow.lost, fast.lost = False, True
    slow.ended_at, fast.ended_at = 102.0, 100.8
    y = exchange(fast, slow, meter=Scripted(100.8, 101.5), ended=102.0)
    assert parts(y) == pytest.approx(Parts(0.1, 0.0, 0.1, 0.6))
    assert list(y.waits()) == [(100.1, 100.1)]


def test_waiting_in_vain_for_another_try_is_waiting() -> None:
    """The time after a failed attempt is nobody's but the queue's, and who leaves then leaves it."""
    x = exchange(attempt(100.1, 100.2, 100.6, "upstream_error"), ended=105.6)
    assert parts(x) == pytest.approx(Parts(0.1, 5.0, 0.1, 0.4))
    x.end(105.6, ClientGone())
    assert phase(x) == "queue"


def test_who_hangs_up_on_an_error_frame_was_failed_by_the_backend() -> None:
    """Libraries close the connection as soon as they have read it; who leaves before that has left."""
    for frame, outcome, fault in ((b"{}", "upstream_error", Fault.BACKEND), (None, "client_disconnect", Fault.LEFT)):
        meter = Scripted(101.0)
        meter.error = frame
        x = exchange(attempt(100.5, 100.7, 103.0), meter=meter, ended=103.0)
        x.outcome = ""
        x.end(103.0, ClientGone())
        assert (x.outcome, x.fault, x.status) == (outcome, fault, 200)


def test_time_per_token_leaves_the_first_one_out() -> None:
    """From the first to the last; none where there is one token only."""
    assert tpot_s(Scripted(1.0, 1.5, 2.0)) == 0.5 and tpot_s(Scripted(1.0, 1.0)) == 0.0
    assert tpot_s(Scripted(1.0)) is tpot_s(Scripted()) is None


@pytest.mark.parametrize(
    ("dispatched", "connected", "tokens", "cause"),
    [
        (100.2, 100.2, (100.5, 100.54), None),
        (101.4, 101.4, (101.5, 101.54), Cause.QUEUE),
        (100.2, 101.2, (101.4, 101.44), Cause.CONNECT),
        (100.2, 100.2, (101.9, 101.94), Cause.PREFILL),
        (100.2, 100.2, (100.5, 100.6), Cause.DECODE),
        (100.2, 100.2, (101.9, 102.9), Cause.PREFILL),
    ],
)
def test_a_stream_is_missed_by_what_took_longest(
    dispatched: float, connected: float, tokens: tuple[float, ...], cause: Cause | None
) -> None:
    """The first token late: by its largest part. Only the others slow: by decoding."""
    x = exchange(attempt(dispatched, connected, 103.0), meter=Scripted(*tokens), ended=103.0)
    judged = verdict(x, parts(x), GOAL)
    assert judged is not None and judged.cause is cause and judged.available
    assert judged.ttft is (tokens[0] - 100.0 <= 1.0)
    assert judged.itl is (tokens[1] - tokens[0] <= 0.05)


def test_a_whole_answer_is_good_in_the_time_of_a_good_stream() -> None:
    """1 s and 0.05 s for each of 20 further tokens: 2 s."""
    meter = Reading(Dialect.CHAT)
    meter.tokens = 21
    for ended, cause in ((102.0, None), (102.1, Cause.PREFILL)):
        x = exchange(attempt(100.1, 100.1, ended), meter=meter, ended=ended)
        judged = verdict(x, parts(x), GOAL)
        assert judged is not None and judged.cause is cause


def test_without_objectives_every_answer_is_good() -> None:
    """Then goodput is availability."""
    x = exchange(attempt(100.2, 100.2, 200.0), meter=Scripted(150.0, 199.0), ended=200.0)
    judged = verdict(x, parts(x), Objective())
    assert judged == (None, None, None)


@pytest.mark.parametrize(
    ("error", "cause", "available"),
    [
        (Unavailable(NO_BACKEND, "no"), Cause.REFUSED, False),
        (UpstreamFailed("no", Phase.SENT), Cause.UPSTREAM, False),
        (GatewayError(NO_BACKEND, "no"), Cause.INTERNAL, False),
    ],
)
def test_what_failed_is_missed_by_its_fault(error: GatewayError, cause: Cause, available: bool) -> None:
    """And it was not available."""
    x = exchange()
    x.end(101.0, error)
    judged = verdict(x, parts(x), GOAL)
    assert judged is not None and judged.cause is cause and judged.available is available


def test_a_client_that_left_says_nothing_of_the_service() -> None:
    """It is in neither count, and it tells how far it was."""
    body, queued = exchange(), exchange()
    body.call = None
    connecting, sent = exchange(attempt(100.2, 0.0, 0.0)), exchange(attempt(100.2, 100.3, 0.0))
    answered = exchange(attempt(100.2, 100.3, 0.0), meter=Scripted(100.5))
    for x in (body, queued, connecting, sent, answered):
        x.end(101.0, ClientGone())
        assert verdict(x, parts(x), GOAL) is None
    assert [phase(x) for x in (body, queued, connecting, sent, answered)] == [
        *("body", "queue", "connect", "backend", "answer")
    ]
