"""Faults under load, in short: `make chaos` is the long form. What a loaded machine decides, times and memory, is
judged by the long form only."""

from __future__ import annotations

import asyncio
import io
import json
from random import Random
from typing import Any

import pytest
from rich.console import Console

from loadtests.chaos import chaos, judge_growth, soak
from loadtests.crowd import Crowd
from loadtests.faultrelay import FaultRelay, Weather, mistimed
from loadtests.judgement import Judgement, deliver
from loadtests.outage import all_die, single
from loadtests.rollout import rollout
from loadtests.stage import Size

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

# What holds on a machine of any speed.
ALWAYS = {
    "lost before the first byte",
    "failed before the first byte",
    "later than 2 s: other than 503 no_backend",
    "attempts per request",
    "failed",
    "gateways that did not end well",
    "left behind when nobody asked any more",
    "tasks more than after warming up",
    "invariants that did not hold",
}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


def kept(judgement: Judgement) -> None:
    """Every promise of those was judged, and none was missed."""
    out = io.StringIO()
    judgement.show(Console(width=120, file=out))
    assert ALWAYS & {line.what for line in judgement.lines}
    assert not ALWAYS & set(judgement.missed), out.getvalue()


async def test_a_storm_of_faults_breaks_no_promise() -> None:
    """Twenty seconds of kills, stops, resets, lies, moves, a store and a name server that are away: nobody is lied to,
    everything is given back."""
    judgement = await chaos(20.0, 7, 12.0)
    kept(judgement)
    assert judgement["faults"].value >= 8


@pytest.mark.parametrize("kind", ["half-open", "clock", "dns-moved", "redis-stop"])
async def test_nobody_sees_one_fault(kind: str) -> None:
    """Before his first byte."""
    kept(await single(kind, 5.0, 1, 12.0, around_s=4.0))


async def test_when_all_are_dead_everybody_is_told() -> None:
    """Truthfully and soon, and served again when one is back."""
    judgement = await all_die(5.0, 1, 12.0, around_s=5.0)
    kept(judgement)
    assert judgement["  and refused within, p99"].value < 0.5
    assert judgement["served again after the first was back"].value < 10.0


async def test_a_quiet_load_leaves_nothing() -> None:
    """All are served."""
    kept(await soak(4.0, 3, 12.0))


async def test_a_rolling_restart_is_not_noticed() -> None:
    """Both gateways, then two backends."""
    kept(await rollout(10.0, backends=2, pause_s=2.0))


class Backend(asyncio.Protocol):
    """Answers every request with a dated document."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        body = b'{"created":1764530000}'
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class Asking:
    """`async with` a connection through a relay; `answer` is that to one request, empty if none comes."""

    def __init__(self, relay: FaultRelay) -> None:
        self.relay = relay

    async def __aenter__(self) -> Asking:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.relay.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()
        self.writer.close()

    async def answer(self) -> bytes:
        self.writer.write(b"POST / HTTP/1.1\r\nx-request-id: here\r\n\r\n")
        try:
            async with asyncio.timeout(0.5):
                return await self.reader.readuntil(b"}")
        except TimeoutError:
            assert self.relay.posts[-1].id == "here"
            return b""


async def test_a_half_open_connection_stays_dead() -> None:
    """While packets are dropped nothing comes; afterwards the old connection is still dead, and a new one is not."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Backend, "127.0.0.1", 0)
    relay = FaultRelay(server.sockets[0].getsockname()[1])
    await relay.start()
    try:
        async with Asking(relay) as old:
            assert await old.answer()
            await relay.turn(Weather.HALF_OPEN)
            assert not await old.answer()
            async with Asking(relay) as new:
                assert not await new.answer()
            await relay.turn(Weather.FAIR)
            assert not await old.answer()
            assert not old.reader.at_eof()
            async with Asking(relay) as new:
                assert await new.answer()
    finally:
        relay.stop()
        server.close()


async def test_a_slow_answer_comes_whole_though_its_backend_has_left() -> None:
    """A backend that closes in time must not cut short what comes late."""

    class Leaving(Backend):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.close()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Leaving, "127.0.0.1", 0)
    relay = FaultRelay(server.sockets[0].getsockname()[1])
    await relay.start()
    try:
        await relay.turn(Weather.SLOW)
        async with Asking(relay) as asking:
            assert await asking.answer()
            assert await asking.reader.read() == b""
    finally:
        relay.stop()
        server.close()


@pytest.mark.parametrize("odd", [False, True])
def test_a_wrong_clock_changes_no_length(odd: bool) -> None:
    """Date, `created` and counters, but no gauge."""
    head = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 19:35:16 GMT\r\n\r\n"
    told = head + b'{"created":1764530000,"n":1764530000}\nx_total{a="b"} 12.0\nrunning{a="b"} 12.0\n'
    wrong = mistimed(told, odd=odd)
    assert len(wrong) == len(told)
    assert b"2026" not in wrong
    assert wrong.count(b"1764530000") == 1
    assert wrong.endswith(b'x_total{a="b"} %b.0\nrunning{a="b"} 12.0\n' % (b"99" if odd else b"00"))


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b'{"error":{"code":500}}'), (200, b'{"choices":[{"finish_reason":null}]}'), (200, b"[]"), (503, b"{}")],
)
async def test_an_answer_of_another_shape_is_a_lie(status: int, body: bytes) -> None:
    """An error under a 200, an end without its reason, no object at all, a refusal that says nothing."""

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nretry-after: 1\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        crowd = Crowd(server.sockets[0].getsockname()[1], 50.0, Random(1), leave=0.0)
        await crowd.run(0.1)
        await crowd.finish()
    assert crowd.told and all(each.lie for each in crowd.told)


def test_a_missed_line_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """And says what was missed, by how much, and why."""
    judgement = Judgement("one")
    judge_growth(judgement, [Size(10, 5, 1000, 0.0), Size(14, 9, 1019, 0.0)], 0.02, 600.0)
    assert deliver([judgement], as_json=False) == 0
    assert "MISSED" not in capsys.readouterr().out
    judge_growth(judgement, [Size(10, 5, 1000, 0.0), Size(14, 9, 1020, 0.0)], 0.02, 600.0)
    judgement.none("lost", ["a", "a", "b"])
    assert deliver([judgement], as_json=True) == 1
    (told,) = json.loads(capsys.readouterr().out)
    missed = [line["what"] for line in told["lines"] if line["met"] is False]
    assert missed == ["resident memory since warming up", "lost"]
    assert told["lines"][-1]["why"] == "2 x a; b"


def test_growth_is_not_judged_before_it_can_be_told() -> None:
    """The table says so."""
    judgement = Judgement("one")
    judge_growth(judgement, [Size(10, 5, 1000, 0.0), Size(10, 5, 2000, 0.0)], 0.02, 60.0)
    assert judgement["resident memory since warming up"].met is None
    assert not judgement.missed
