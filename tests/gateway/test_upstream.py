"""The pool of connections to backends: when one is used again, when a request is sent again, and what leaving does."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backend import Backend, Timeouts
from gateway.errors import GatewayError, Phase, Unanswered, UpstreamFailed, UpstreamTimeout
from gateway.exchange import Attempt, Call, Dialect, Endpoint, Tally
from gateway.upstream import Upstream
from policies.types import Dispatch, Job
from tests.faults.fakes import Fake, FakeConnection
from tests.path.house import AtAwait

DECISION = Dispatch(Job(1, "t", 0.0), "b")
pytestmark = pytest.mark.anyio

CLOCKS = Timeouts(connect=2.0, headers=5.0, first_token=5.0, idle=5.0, total=20.0)


def call(*body: bytes | memoryview) -> Call:
    return Call(
        Endpoint("/v1/x", Dialect.OTHER), model="m", label="m", pool="p", body=[*body] or [b"{}"], target=b"/v1/x"
    )


class Way:
    """An upstream and one backend."""

    def __init__(self, fake: Fake, timeouts: Timeouts = CLOCKS) -> None:
        self.late = 0.0  # seconds that the clock is ahead
        self.upstream = Upstream(lambda: time.monotonic() + self.late)
        self.backend = Backend(fake.url, "p", fake.host, fake.port, b"backend", timeouts=timeouts)

    async def ask(self, *body: bytes | memoryview) -> tuple[int, bytes]:
        """Status and body of one whole answer. Raises UpstreamFailed."""
        attempt = Attempt(self.backend, DECISION, 0.0, on_first_token=lambda now: None, tally=Tally())
        async with asyncio.timeout(10.0), self.upstream.open(attempt, call(*body)) as reply:
            data = b""
            while piece := await reply.read():
                data += piece
            return reply.status, data

    @property
    def idle(self) -> int:
        return int(repr(self.upstream).split(", ")[1].split(" ")[0])

    @property
    def replies(self) -> int:
        return int(repr(self.upstream).split("[")[1].split(" ")[0])


@asynccontextmanager
async def way(fake: Fake, timeouts: Timeouts = CLOCKS) -> AsyncIterator[Way]:
    async with fake:
        found = Way(fake, timeouts)
        async with found.upstream:
            yield found
            assert found.replies == 0


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def echo(connection: FakeConnection) -> None:
    """Sends back each body."""
    while True:
        await connection.answer((await connection.request()).body)


# -- reuse -----------------------------------------------------------------------------------------------------------


async def test_a_connection_serves_one_request_after_the_other() -> None:
    """20 of them on one connection, and none at once."""
    async with way(fake := Fake(echo)) as here:
        for number in range(20):
            assert await here.ask(b"%d" % number) == (200, b"%d" % number)
        assert fake.accepts == 1
        assert here.idle == 1
        await asyncio.gather(*(here.ask(b"x") for _ in range(5)))
        assert fake.accepts == 5
        assert here.idle == 5


ENDINGS = {
    "close": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
    "http/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "another answer": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200\r\nContent-Length: 4\r\n\r\nevil",
    "garbage behind": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\0\0\0",
    "max=1": b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=0\r\nContent-Length: 2\r\n\r\nok",
    "timeout=1": b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok",
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_connection_that_should_not_be_used_again_is_closed(name: str) -> None:
    """By what the backend says, or by what it does."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.send(ENDINGS[name])
        await connection.wait_closed()

    async with way(fake := Fake(script)) as here:
        for _ in range(2):
            assert await here.ask() == (200, b"ok")
        assert fake.accepts == 2
        await until(lambda: len(fake.closed) >= (1 if name == "timeout=1" else 2))


async def test_an_announced_limit_on_requests_is_kept() -> None:
    """`max=2` behind an answer: two more requests, then another connection."""

    async def script(connection: FakeConnection) -> None:
        for left in (2, 1, 0):
            await connection.request()
            await connection.answer(b"ok", Keep_Alive=f"timeout=60, max={left}")
        await connection.wait_closed()

    async with way(fake := Fake(script)) as here:
        for _ in range(6):
            await here.ask()
        assert fake.accepts == 2


async def test_idle_connections_expire() -> None:
    """After 4 s, before the 5 s of most engines; earlier where the backend announced less."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.answer(b"ok", Keep_Alive="timeout=3")
        await connection.wait_closed()

    for each, limit_s in ((echo, 4.0), (script, 2.0)):
        async with way(fake := Fake(each)) as here:
            await here.ask()
            here.late = limit_s - 1.0
            await asyncio.sleep(0.3)
            assert here.idle == 1
            here.late = limit_s + 0.5
            await until(lambda here=here: here.idle == 0)  # type: ignore[misc]
            await until(lambda fake=fake: not fake.tasks)  # type: ignore[misc]


async def test_bytes_on_an_idle_connection_are_nobodys_answer() -> None:
    """A backend that speaks unasked loses the connection; the next request gets its own answer."""
    spoken = asyncio.Event()

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.answer(b"mine")
        if not spoken.is_set():
            await asyncio.sleep(0.01)
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
            spoken.set()
            await connection.wait_closed()

    async with way(fake := Fake(script)) as here:
        assert await here.ask() == (200, b"mine")
        await spoken.wait()
        await until(lambda: fake.closed, 2.0)  # not only because it expired
        assert await here.ask() == (200, b"mine")
        assert fake.accepts == 2


# -- sending again ---------------------------------------------------------------------------------------------------


def dying(connection_ends: Callable[[FakeConnection], Any], first: int = 1) -> Callable[[FakeConnection], Any]:
    """Each connection answers `first` requests; the next one is read, and ends it."""

    async def script(connection: FakeConnection) -> None:
        for _ in range(first):
            await connection.request()
            await connection.answer(b"ok")
        await connection.request()
        result = connection_ends(connection)
        if result is not None:
            await result

    return script


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_reused_connection_that_closes_without_a_byte_costs_one_more_send(how: str) -> None:
    """On a fresh connection, and there only once."""
    script = dying(lambda connection: connection.fin() if how == "fin" else connection.reset())
    async with way(fake := Fake(script)) as here:
        assert await here.ask() == (200, b"ok")
        assert await here.ask() == (200, b"ok")
        assert (fake.accepts, fake.hits) == (2, 3)


async def test_a_reused_connection_that_closes_later_is_not_tried_again() -> None:
    """The backend has worked on the request, which may be what it died of: another try is for the budget to decide."""

    async def worked(_: FakeConnection) -> None:
        here.late += 2.0

    async with way(fake := Fake(dying(worked))) as here:
        await here.ask()
        with pytest.raises(Unanswered):
            await here.ask()
        assert (fake.accepts, fake.hits) == (1, 2)


async def test_several_dead_connections_cost_one_send_each_at_most() -> None:
    """The second try does not draw another dead one."""
    async with way(fake := Fake(dying(lambda connection: connection.fin()))) as here:
        await asyncio.gather(*(here.ask() for _ in range(4)))
        assert here.idle == 4
        hits = fake.hits
        assert await here.ask() == (200, b"ok")
        assert fake.hits == hits + 2


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_fresh_connection_that_closes_without_a_byte_is_not_tried_again(how: str) -> None:
    """The backend got the request whole and may be running it."""
    script = dying(lambda connection: connection.fin() if how == "fin" else connection.reset(), first=0)
    async with way(fake := Fake(script)) as here:
        with pytest.raises(Unanswered) as failed:
            await here.ask()
        assert failed.value.phase is Phase.SENT
        assert (fake.accepts, fake.hits) == (1, 1)


async def test_a_reused_connection_that_closes_after_a_byte_is_not_tried_again() -> None:
    """It had begun to answer."""

    async def one_byte(connection: FakeConnection) -> None:
        await connection.send(b"H")
        connection.fin()

    async with way(fake := Fake(dying(one_byte))) as here:
        await here.ask()
        with pytest.raises(UpstreamFailed) as failed:
            await here.ask()
        assert not isinstance(failed.value, Unanswered)
        assert fake.hits == 2


async def test_a_backend_that_accepts_and_closes_fails_at_once() -> None:
    """As a balancer without backends does."""

    async def script(connection: FakeConnection) -> None:
        connection.reset()

    async with way(fake := Fake(script)) as here:
        begun = time.monotonic()
        with pytest.raises(UpstreamFailed):
            await here.ask()
        assert time.monotonic() - begun < 2.0
        assert fake.accepts == 1


async def test_a_refused_connection_is_told_as_one() -> None:
    """Nothing was sent."""
    async with way(fake := Fake(echo)) as here:
        await fake.stop()
        with pytest.raises(UpstreamFailed) as failed:
            await here.ask()
        assert failed.value.phase is Phase.CONNECT
        await fake.start()


# -- large requests --------------------------------------------------------------------------------------------------

LARGE = bytes(range(256)) * 40_000  # more than the buffers of both sockets


async def test_a_large_request_arrives_whole_at_the_pace_of_the_backend() -> None:
    """10 MB in pieces, one of them a view, to a backend that waits first: no more than a slice is buffered here."""
    buffered: list[int] = []

    async def script(connection: FakeConnection) -> None:
        await asyncio.sleep(0.05)
        (reply,) = here.upstream._replies
        transport = reply._link._transport
        assert transport is not None
        buffered.append(transport.get_write_buffer_size())
        body = (await connection.request()).body
        await connection.answer(hashlib.sha256(body).hexdigest().encode())

    async with way(fake := Fake(script, narrow=True)) as here:
        status, digest = await here.ask(b"{", memoryview(LARGE)[:5_000_000], LARGE[5_000_000:], b"}")
        assert fake.errors == []
        assert (status, digest.decode()) == (200, hashlib.sha256(b"{" + LARGE + b"}").hexdigest())
        assert 0 < buffered[0] <= 3 * 64 * 1024
        assert here.idle == 1


@pytest.mark.parametrize("then", ["waits", "closes", "resets"])
async def test_an_answer_that_comes_before_the_request_is_sent_ends_the_sending(then: str) -> None:
    """A backend refuses a body without reading it, whatever it does with the connection afterwards: the answer is
    passed on at once, and the connection is not used again."""

    async def script(connection: FakeConnection) -> None:
        await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(0.05)
        if then == "waits":
            await asyncio.sleep(3.0)
        connection.fin() if then == "closes" else connection.reset()

    async with way(Fake(script, narrow=True)) as here:
        begun = time.monotonic()
        assert await here.ask(LARGE) == (413, b"no")
        assert time.monotonic() - begun < 2.0
        assert here.idle == 0


# -- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["fresh", "warm", "dead", "large"])
async def test_cancelling_at_any_await_leaves_no_connection_and_no_reply(kind: str, late: bool) -> None:
    """n = 1, 2, 3 ... until it completes: each connection is in the pool or closed, the next request is answered."""

    async def halting(connection: FakeConnection) -> None:
        while True:
            body = (await connection.request()).body
            await connection.head(transfer_encoding="chunked")
            for piece in (b"one", b"two"):
                await asyncio.sleep(0.001)
                await connection.chunk(piece)
            assert body
            await connection.last_chunk()

    script = dying(lambda connection: connection.fin()) if kind == "dead" else halting
    body = LARGE if kind == "large" else b"{}"
    async with way(fake := Fake(script, narrow=True)) as here:
        for n in range(1, 100):
            if kind in ("warm", "dead"):
                await fake.play(script)
                await here.ask()
            task = asyncio.create_task(run(here.ask(body), n, late=late))
            try:
                await task
            except asyncio.CancelledError:
                pass
            else:
                break
            await until(lambda: here.replies == 0)
            await until(lambda: len(fake.tasks) <= here.idle)
        assert n > 1
        await fake.play(halting)
        assert await here.ask() == (200, b"onetwo")


async def run(coroutine: Any, n: int, *, late: bool) -> Any:
    task = asyncio.current_task()
    assert task is not None
    return await AtAwait(coroutine, n, task.cancel, late=late)


async def test_leaving_in_mid_answer_closes_the_connection() -> None:
    """The backend sees it at once and stops working."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(b"one")
        await connection.wait_closed()

    async with way(fake := Fake(script)) as here:
        attempt = Attempt(here.backend, DECISION, 0.0, on_first_token=lambda now: None, tally=Tally())
        async with here.upstream.open(attempt, call()) as reply:
            assert await reply.read() == b"one"
        await until(lambda: fake.closed)
        assert here.idle == 0


async def test_shutting_down_fails_what_is_being_read_and_closes_what_is_idle() -> None:
    """`fail_all` for the replies, leaving the block for the rest."""

    async def script(connection: FakeConnection) -> None:
        while (await connection.request()).body != b"wait":
            await connection.answer(b"ok")
        await connection.wait_closed()

    fake = Fake(script)
    async with way(fake) as here:
        await asyncio.gather(here.ask(), here.ask())
        waiting = asyncio.create_task(here.ask(b"wait"))
        await until(lambda: fake.hits == 3)
        error = UpstreamTimeout("total", 1.0, Phase.SENT)
        here.upstream.fail_all(error)
        with pytest.raises(GatewayError) as failed:
            await waiting
        assert failed.value is error
        assert len(fake.tasks) >= 1
        await here.upstream.__aexit__()
        await until(lambda: not fake.tasks)
        await here.upstream.__aenter__()


async def test_a_backend_that_is_forgotten_keeps_only_what_is_under_way() -> None:
    """Its idle connections close at once; the answer that is being read comes to its end."""
    go_on = asyncio.Event()

    async def script(connection: FakeConnection) -> None:
        while (await connection.request()).body != b"wait":
            await connection.answer(b"ok")
        await go_on.wait()
        await connection.answer(b"late")

    fake = Fake(script)
    async with way(fake) as here:
        await asyncio.gather(here.ask(), here.ask())
        waiting = asyncio.create_task(here.ask(b"wait"))
        await until(lambda: fake.hits == 3)
        assert here.idle == 1
        here.upstream.forget([here.backend])
        assert here.idle == 0
        await until(lambda: len(fake.tasks) == 1)
        go_on.set()
        assert await waiting == (200, b"late")


async def test_connections_outlive_a_change_of_settings() -> None:
    """A backend with the same name is the same backend, whatever else is told of it."""
    fake = Fake(echo)
    async with way(fake) as here:
        await here.ask()
        here.backend = replace(here.backend, timeouts=Timeouts(connect=3.0), authorization=b"Bearer new")
        await here.ask()
        assert fake.accepts == 1
        assert fake.requests[1].header("authorization") == "Bearer new"


# -- any order of anything -------------------------------------------------------------------------------------------

KINDS = ("length", "chunked", "until close", "says close", "too much", "dies idle", "speaks idle", "cut", "silent")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), min_size=1, max_size=8))
def test_every_request_gets_its_own_answer_or_an_error(rounds: list[list[str]]) -> None:
    """Backends that do anything, several requests at once: an answer is never another request's, and what ends badly is
    told."""

    async def script(connection: FakeConnection) -> None:
        while True:
            body = (await connection.request()).body
            if await behave(connection, body.split(b":")[0].decode(), body):
                return

    async def play() -> None:
        async with way(fake := Fake(script)) as here:
            number = 0
            for kinds in rounds:
                bodies = [b"%b:%d" % (kind.encode(), number + place) for place, kind in enumerate(kinds)]
                number += len(kinds)
                answers = await asyncio.gather(*(here.ask(body) for body in bodies), return_exceptions=True)
                for kind, body, answer in zip(kinds, bodies, answers, strict=True):
                    if kind in ("cut", "silent"):
                        assert isinstance(answer, UpstreamFailed), (kind, answer)
                    else:
                        assert answer == (200, body), kind
            assert here.replies == 0
            assert fake.errors == []

    asyncio.run(play())


async def behave(connection: FakeConnection, kind: str, body: bytes) -> bool:
    """One answer; True where the connection is of no more use."""
    head = b"HTTP/1.1 200 OK\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body)
    sent = {
        "length": head + length + body,
        "chunked": head + chunked + b"0\r\nX-Trailer: 1\r\n\r\n",
        "until close": head + b"\r\n" + body,
        "says close": head + b"Connection: close\r\n" + length + body,
        "too much": (head + length + body) * 2,
        "dies idle": head + length + body,
        "speaks idle": head + length + body,
        "cut": head + chunked,
        "silent": b"",
    }[kind]
    await connection.send(sent)
    connection.finish()
    if kind in ("until close", "cut", "silent", "dies idle"):
        connection.fin()
        return True
    if kind == "speaks idle":
        await connection.send(head + b"Content-Length: 4\r\n\r\nevil")
    return kind in ("says close", "too much", "speaks idle")
