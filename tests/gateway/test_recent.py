"""The ring of bad requests: bounded, of all kinds, and without what was said."""

from __future__ import annotations

import msgspec
import pytest

from gateway.backend import Backend
from gateway.catalog import Tenant
from gateway.errors import QUEUE_FULL, ClientGone, Unavailable
from gateway.exchange import Attempt, Call, Endpoint, Exchange, Tally
from gateway.recent import APART_S, OF_A_KIND, Recent
from gateway.timeline import Cause, Parts, parts
from policies.types import Dispatch, Job, Wait

CHAT = Endpoint("/v1/chat/completions", generates=True)


def refused(recent: Recent, wall: float) -> None:
    x = Exchange("req_1", 0.0, CHAT)
    x.end(0.1, Unavailable(QUEUE_FULL, "Full."))
    recent.note(x, parts(x), Cause.REFUSED, wall)


def late(wall: float, recent: Recent) -> Exchange:
    """Queued for a second, sent to the cheaper of two, and answered after two."""
    x = Exchange("req_2", 10.0, CHAT)
    body = [memoryview(b'"the secret"')]
    x.identify(Tenant("acme"), Call(CHAT, "m", "m", "p", [], prompt=body, headers=[(b"authorization", b"key")]))
    x.queued_at = 10.0
    job = Job(1, "acme", 10.0)
    record = Dispatch(job, "http://a", 100, 50, 1.0, Wait.WARM, ((70.0, "http://b"), (50.0, "http://a")), 20)
    attempt = Attempt(Backend("http://a", "p", "a", 80, b"a"), record, 11.0, lambda _: None, Tally())
    attempt.connected_at, attempt.ended_at, attempt.status = 11.1, 12.0, 200
    x.attempts.append(attempt)
    x.status = 200
    x.end(12.0)
    recent.note(x, parts(x), Cause.QUEUE, wall)
    return x


def test_good_requests_are_passed_over() -> None:
    """Only what was slow or failed is kept."""
    recent, x = Recent(), Exchange("req", 0.0, CHAT)
    x.end(1.0)
    recent.note(x, Parts(1, 0, 0, 0), None, 1.0)
    assert recent.latest(9) == []


def test_a_story_is_whole_and_holds_no_prompt() -> None:
    """The timeline adds up; the decision is what the scheduler recorded, cheapest first."""
    recent = Recent()
    late(5.0, recent)
    (seen,) = recent.latest(9)
    assert sum(seen.timeline.values()) == pytest.approx(seen.total_ms) == 2000.0
    assert seen.timeline["queue"] == 1000.0
    (attempt,) = seen.attempts
    assert [(each.backend, each.price) for each in attempt.considered] == [("http://a", 50.0), ("http://b", 70.0)]
    assert (attempt.waited_for, attempt.cached_tokens, attempt.missed_tokens) == ("warm", 100, 20)
    assert (attempt.dispatched_ms, attempt.connected_ms, attempt.first_token_ms) == (1000.0, 1100.0, None)
    told = msgspec.json.encode(seen)
    assert b"secret" not in told and b"authorization" not in told
    assert recent.find(seen.number) is seen and recent.find(99) is None


def test_a_flood_of_one_kind_does_not_push_out_the_others() -> None:
    """And most of it is not even looked at."""
    recent = Recent()
    late(0.0, recent)
    for number in range(1000):
        refused(recent, number * APART_S / 10)
    assert [seen.outcome for seen in recent.latest(1000)] == ["queue_full"] * OF_A_KIND + ["ok"]


def test_the_latest_come_first_and_so_many() -> None:
    """Of all kinds together."""
    recent = Recent()
    for number in range(6):
        refused(recent, number * 1.0)
        late(number * 1.0, recent)
    latest = recent.latest(4)
    assert [seen.outcome for seen in latest] == ["ok", "queue_full", "ok", "queue_full"]
    assert [seen.number for seen in latest] == [12, 11, 10, 9]


def test_a_client_that_left_is_told() -> None:
    """With the phase in which it did."""
    recent, x = Recent(), Exchange("req", 0.0, CHAT)
    x.end(1.0, ClientGone())
    recent.note(x, parts(x), None, 1.0)
    assert recent.latest(1)[0].outcome == "client_disconnect"


def test_a_clock_that_is_set_back_does_not_stop_it() -> None:
    """The wall clock may jump."""
    recent = Recent()
    refused(recent, 100.0)
    refused(recent, 50.0)
    assert len(recent.latest(9)) == 2
