"""A client connection: requests come out of bytes however they are cut, answers go back framed, and nothing that a
client sends does more than end its own connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import h11
import pytest
import uvicorn
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.connection import MOST_PIPELINED, Connection, HeadLimits
from gateway.exchange import Endpoint
from gateway.turn import HIGH_WATER, Turn
from tests.path.house import Wire

ENDPOINT = Endpoint("/v1/x")
HEAD = b"HTTP/1.1 200 OK\r\n"

Infer = Callable[[Turn], Awaitable[None]]


async def nowhere(scope: Any, receive: Any, send: Any) -> None:
    """The application for everything else."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connect(infer: Infer, limits: HeadLimits = HeadLimits()) -> Wire:  # noqa: B008 (frozen)
    """A client comes."""
    config = uvicorn.Config(nowhere, interface="asgi3", loop="none", ws="none", lifespan="off", log_config=None)
    targets: Any = {ENDPOINT.target: ENDPOINT}
    return Wire(Connection(config, ServerState(), {}, limits=limits, endpoints=targets, infer=infer))  # type: ignore[arg-type]


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(30):
        await asyncio.sleep(0)


async def read(turn: Turn) -> bytes:
    """The whole body."""
    whole = turn.whole()
    if whole is not None:
        return whole
    body = b""
    while piece := await turn.piece():
        body += piece
    return b"broken" if turn.gone or turn.broken else body


async def echo(turn: Turn) -> None:
    """Says how many bytes came and what their last ones were."""
    body = await read(turn)
    if not turn.gone:
        turn.answer(HEAD if body != b"broken" else b"HTTP/1.1 400 Bad Request\r\n", b"%d:%b" % (len(body), body[-9:]))


def request(body: bytes, framing: str, lines: Sequence[bytes] = ()) -> bytes:
    head = [b"POST /v1/x HTTP/1.1", b"Host: g", *lines]
    if framing == "length":
        return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])
    size = {"chunks": 3, "chunk": len(body) or 1}[framing]
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    data = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nX-Trailer: 1\r\n\r\n"
    return b"\r\n".join([*head, b"Transfer-Encoding: chunked", b"", data])


def answers(sent: bytes, *, closed: bool) -> list[tuple[int, bytes]]:
    """Status and body of each response, as h11 reads them."""
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(sent)
    if closed:
        connection.receive_data(b"")
    found: list[tuple[int, bytes]] = []
    status, body = 0, b""
    while True:
        if connection.our_state is h11.IDLE:
            connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
            connection.send(h11.EndOfMessage())
        event = connection.next_event()
        if isinstance(event, h11.Response):
            status, body = event.status_code, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            found.append((status, body))
            if connection.their_state is not h11.DONE or not connection.trailing_data[0]:
                return found
            connection.start_next_cycle()
        else:
            return found


def run(test: Callable[[], Awaitable[None]]) -> None:
    """A loop of its own for each example; whatever a callback raises fails it."""
    faults: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert not faults


BODIES = st.lists(
    st.tuples(st.binary(max_size=40) | st.integers(70_000, 70_001), st.sampled_from(["length", "chunks", "chunk"])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(BODIES, st.lists(st.integers(0, 500), max_size=6), st.booleans())
def test_requests_come_out_however_they_are_cut(
    told: list[tuple[bytes | int, str]], cuts: list[int], offers: bool
) -> None:
    """Any requests in a row, framed in any way, cut anywhere, with an offer of h2c or without: each answered in order
    with the length of its own body."""
    bodies = [(body if isinstance(body, bytes) else b"z" * body, framing) for body, framing in told]

    async def test() -> None:
        lines = [b"Connection: Upgrade", b"Upgrade: h2c"] if offers else []
        data = b"".join(request(body, framing, lines) for body, framing in bodies)
        bounds = sorted({cut % len(data) for cut in cuts} | {0, len(data)})
        wire = connect(echo)
        for start, end in pairwise(bounds):
            wire.feed(data[start:end])
            await settle()
        assert answers(bytes(wire.sent), closed=wire.closed) == [
            (200, b"%d:%b" % (len(body), body[-9:])) for body, _ in bodies
        ]
        wire.leave()
        await settle()

    run(test)


PIECES = [
    b"POST /v1/x HTTP/1.1\r\n",
    b"POST http://g/v1/x HTTP/1.0\r\n",
    b"GET / HTTP/1.1\r\n",
    b"HEAD /v1/x HTTP/1.1\r\n",
    b"CONNECT x HTTP/1.1\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"Host: g\r\n",
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Expect: 100-continue\r\n",
    b"X: " + b"a" * 70_000 + b"\r\n",
    b"\r\n",
    b"\n",
    b"abc",
    b"3\r\nabc\r\n",
    b"0\r\n\r\n",
    b"zz\r\n",
    b"\0",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(range(len(PIECES))) | st.binary(max_size=8), max_size=12), st.booleans())
def test_any_bytes_end_in_answers_or_a_closed_connection(numbers: list[int | bytes], at_once: bool) -> None:
    """No exception, nothing but whole responses, and nothing behind one that closes."""
    pieces = [each if isinstance(each, bytes) else PIECES[each] for each in numbers]

    async def test() -> None:
        wire = connect(echo)
        for piece in [b"".join(pieces)] if at_once else pieces:
            wire.feed(piece)
            await settle()
        sent = bytes(wire.sent).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert not sent or answers(sent, closed=True)
        wire.leave()
        await settle()

    run(test)


@pytest.mark.anyio
@pytest.mark.parametrize(("version", "chunked"), [(b"1.1", True), (b"1.0", False)])
@pytest.mark.parametrize("length", [None, 6])
async def test_an_answer_is_framed_for_its_client(version: bytes, chunked: bool, length: int | None) -> None:
    """By its length where it has one, in chunks where the client knows them, else by the end of the connection."""

    async def answer(turn: Turn) -> None:
        turn.begin(HEAD, length, b"one")
        turn.writer()(b"two")
        turn.end()

    wire = connect(answer)
    wire.feed(request(b"x", "length").replace(b"HTTP/1.1", b"HTTP/" + version))
    await settle()
    head, _, body = bytes(wire.sent).partition(b"\r\n\r\n")
    assert (b"content-length: 6" in head) == (length is not None)
    assert (b"transfer-encoding: chunked" in head) == (length is None and chunked)
    assert body == (b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" if length is None and chunked else b"onetwo")
    assert wire.closed == (version == b"1.0")
    assert answers(bytes(wire.sent), closed=wire.closed) == [(200, b"onetwo")]


@pytest.mark.anyio
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_has_no_length(status: bytes) -> None:
    """And the next one is read where it begins."""

    async def answer(turn: Turn) -> None:
        turn.answer(b"HTTP/1.1 %b\r\n" % status, b"", sized=False)

    wire = connect(answer)
    wire.feed(request(b"x", "length") * 2)
    await settle()
    assert b"content-length" not in wire.sent
    assert answers(bytes(wire.sent), closed=False) == [(int(status[:3]), b"")] * 2


@pytest.mark.anyio
async def test_a_slow_client_pauses_what_its_answer_comes_from() -> None:
    """Beyond the high-water mark, and lets it go on when it has read."""

    class Source:
        paused = False

        def pause(self) -> None:
            self.paused = True

        def resume(self) -> None:
            self.paused = False

    source = Source()
    turns: list[Turn] = []

    async def answer(turn: Turn) -> None:
        turns.append(turn)
        turn.begin(HEAD, None, b"")
        turn.feed_from(source)
        turn.writer()(b"x" * (HIGH_WATER + 1))

    wire = connect(answer)
    wire.taking = False
    wire.feed(request(b"x", "length"))
    await settle()
    assert source.paused
    wire.take()
    assert not source.paused
    turns[0].end()
    wire.leave()
    await settle()


@pytest.mark.anyio
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("pipelines", [True, False])
async def test_who_never_takes_the_end_of_an_answer_is_cut_off(
    keeps: bool, pipelines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind an answer that closes, and with more requests that wait for room; not who has read it."""
    monkeypatch.setattr("gateway.connection.CLIENT_STALL_S", 0.1)

    async def answer(turn: Turn) -> None:
        turn.answer(HEAD, b"x" * (HIGH_WATER + 1))

    asked = request(b"x", "length", [] if keeps else [b"Connection: close"])
    reader, wire = connect(answer), connect(answer)
    wire.taking = False
    reader.feed(asked)
    wire.feed(asked * 2 if pipelines and keeps else asked)
    await settle()
    assert not wire.closed
    async with asyncio.timeout(5.0):
        while not wire.closed:
            await asyncio.sleep(0.01)
    assert reader.closed is not keeps
    reader.leave()


@pytest.mark.anyio
async def test_a_client_that_leaves_is_told_of_at_once() -> None:
    """While its body is read and while its answer is awaited; nothing is written to it any more."""
    left: list[str] = []

    async def reading(turn: Turn) -> None:
        left.append("reading" if await read(turn) == b"broken" and turn.gone else "read")

    async def waiting(turn: Turn) -> None:
        turn.on_gone = lambda: left.append("waiting")
        await asyncio.sleep(0)

    for infer, data in ((reading, request(b"abc", "length")[:-1]), (waiting, request(b"abc", "length"))):
        wire = connect(infer)
        wire.feed(data)
        await settle()
        wire.leave()
        await settle()
    assert left == ["reading", "waiting"]


@pytest.mark.anyio
async def test_one_read_of_requests_has_an_end() -> None:
    """Behind a request that is not answered yet only so many more wait; the rest of what came is dropped, and the
    connection with it."""
    begun: list[Turn] = []

    async def slow(turn: Turn) -> None:
        begun.append(turn)
        await asyncio.sleep(0.001)
        turn.answer(HEAD, b"")

    wire = connect(slow)
    wire.feed(request(b"", "length") * 10_000)
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if wire.closed:
            break
    assert wire.closed
    assert len(begun) == MOST_PIPELINED + 1


@pytest.mark.anyio
async def test_a_head_has_its_time() -> None:
    """From the connection, and from its first byte: 408 for half a head, no word where nothing came."""
    limits = HeadLimits(seconds=0.05)
    silent, half, second = (connect(echo, limits) for _ in range(3))
    half.feed(b"POST /v1/x HT")
    second.feed(request(b"", "length"))
    await settle()
    second.feed(b"\r\n")
    await asyncio.sleep(0.3)
    assert silent.closed and not silent.sent
    assert second.closed and answers(bytes(second.sent), closed=True) == [(200, b"0:")]
    status, _ = answers(bytes(half.sent), closed=True)[0]
    assert status == 408
