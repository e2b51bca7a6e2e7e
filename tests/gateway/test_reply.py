"""One answer on its way in: its clocks, its flow control, and how it may end. The socket is scripted, time is passed
in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backend import Timeouts
from gateway.errors import ClientGone, GatewayError, Phase, Unanswered, UpstreamFailed, UpstreamTimeout
from gateway.link import Link
from gateway.reply import CLIENT_STALL_S, HIGH_WATER, Reply

pytestmark = pytest.mark.anyio

CLOCKS = Timeouts(connect=1.0, headers=2.0, first_token=5.0, idle=3.0, total=20.0)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
STEADY = settings(derandomize=True, deadline=None)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Socket(asyncio.Transport):
    """What the gateway writes to a backend, and whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.reading = True
        self.aborted = False

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


class Scene:
    """A reply on a link, and a hand on the clock."""

    def __init__(self, timeouts: Timeouts = CLOCKS, *, stream: bool = True) -> None:
        self.now = 100.0
        self.socket = Socket()
        self.link = Link()
        self.link.connection_made(self.socket)
        self.reply = Reply(self.link, timeouts, stream=stream, clock=lambda: self.now)

    def get(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.link.data_received(piece)

    def at(self, seconds: float) -> GatewayError | None:
        """The clock stands at `seconds` after the start: what the sweep makes of it."""
        self.now = 100.0 + seconds
        self.reply.sweep(self.now)
        return self.reply._failure


async def ends(awaitable: Coroutine[Any, Any, Any]) -> Any:
    """What it returns or raises, without more time passing."""
    try:
        async with asyncio.timeout(5.0):
            return await awaitable
    except GatewayError as error:
        return error


async def rest(reply: Reply) -> bytes:
    """All that can be read."""
    body = b""
    while data := await reply.read():
        body += data
    return body


# -- the five clocks -------------------------------------------------------------------------------------------------


def clock_of(failure: GatewayError | None) -> str:
    assert isinstance(failure, UpstreamTimeout), failure
    return failure.clock


async def test_the_headers_clock() -> None:
    """Runs from the moment the request is sent until the head is whole."""
    scene = Scene()
    scene.get(HEAD[:-2])
    assert scene.at(2.0) is None
    assert clock_of(scene.at(2.1)) == "headers"
    assert scene.socket.aborted


async def test_the_headers_clock_waits_for_a_large_request() -> None:
    """While the backend still takes the request it cannot answer."""
    scene = Scene()
    scene.now += 1.5
    assert scene.reply.awaited()
    assert scene.at(3.4) is None
    assert clock_of(scene.at(3.6)) == "headers"


async def test_without_a_limit_a_whole_answer_may_take_the_total_until_its_head() -> None:
    """It is generated before its head is sent; a stream has 30 s for it."""
    assert Scene(Timeouts(total=900.0), stream=False).at(899.0) is None
    assert clock_of(Scene(Timeouts(total=900.0), stream=False).at(901.0)) == "total"
    assert clock_of(Scene(Timeouts(total=900.0), stream=True).at(31.0)) == "headers"


async def test_the_first_token_clock() -> None:
    """Comments do not stop it; the first token does, and then the idle clock runs."""
    scene = Scene()
    for second in (1, 2, 3, 4):
        scene.now = 100.0 + second
        scene.get(HEAD if second == 1 else chunk(b": wait\n\n"))
        assert scene.at(second) is None
    assert scene.at(5.0) is None
    assert clock_of(scene.at(5.1)) == "first_token"


async def test_the_idle_clock() -> None:
    """Anything that comes sets it back."""
    scene = Scene()
    scene.reply.waits_for_token = False
    for second in (1.0, 3.5, 6.0):
        scene.now = 100.0 + second
        scene.get(HEAD if second == 1.0 else chunk(b"x"))
    assert scene.at(9.0) is None
    assert clock_of(scene.at(9.1)) == "idle"


async def test_behind_the_finish_reason_only_events_are_progress() -> None:
    """Heartbeats of a stream that has said that it is over do not keep it open."""

    class Meter:
        finish: str | None = None
        last_data_at: float | None = None

    scene, meter = Scene(), Meter()
    scene.reply.waits_for_token = False
    scene.reply.meter = meter
    scene.get(HEAD)
    meter.finish, meter.last_data_at = "stop", 101.0
    scene.now = 103.5
    scene.get(chunk(b": hb\n\n"))
    assert scene.at(4.0) is None
    assert clock_of(scene.at(4.1)) == "idle"


async def test_the_total_clock_runs_in_any_case() -> None:
    """However busy the stream is, and while its client is slow."""
    scene = Scene(Timeouts(idle=100.0, total=20.0))
    scene.get(HEAD)
    scene.reply.waits_for_token = False
    scene.reply.pause()
    assert scene.at(20.0) is None
    assert clock_of(scene.at(20.1)) == "total"


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    """Meanwhile the backend is not to blame for its silence: nobody reads what it sends."""
    scene = Scene(Timeouts(idle=3.0, total=1000.0))
    scene.get(HEAD)
    scene.reply.waits_for_token = False
    scene.reply.pause()
    assert not scene.socket.reading
    assert scene.at(CLIENT_STALL_S) is None
    scene.reply.resume()
    assert scene.socket.reading
    assert scene.at(CLIENT_STALL_S + 2.9) is None
    scene.reply.pause()
    failure = scene.at(2 * CLIENT_STALL_S + 3.0)
    assert isinstance(failure, ClientGone)
    assert failure.refusal.reason == "client_stalled"


# -- endings ---------------------------------------------------------------------------------------------------------


async def test_no_byte_is_unanswered() -> None:
    """The one failure after which a reused connection may be tried again."""
    scene = Scene()
    scene.link.connection_lost(None)
    assert isinstance(await ends(scene.reply.wait_head()), Unanswered)


@pytest.mark.parametrize("came", [b"H", HEAD[:-1], b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_byte_is_an_answer_that_broke(came: bytes) -> None:
    """The backend had begun: nobody knows what it did."""
    scene = Scene()
    scene.get(came)
    scene.link.connection_lost(None)
    failure = await ends(scene.reply.wait_head())
    assert isinstance(failure, UpstreamFailed)
    assert not isinstance(failure, Unanswered)
    assert failure.refusal.reason == "upstream_truncated"


async def test_what_came_is_read_before_the_break_is_told() -> None:
    """Two chunks and the end of the connection in one turn of the loop; the phase is that of the reading."""
    scene = Scene()
    scene.get(HEAD + chunk(b"one") + chunk(b"two"))
    scene.link.connection_lost(ConnectionResetError())
    await scene.reply.wait_head()
    assert await scene.reply.read() == b"onetwo"
    scene.reply.phase = Phase.STREAMING
    failure = await ends(scene.reply.read())
    assert failure.phase is Phase.STREAMING
    assert failure.refusal.reason == "upstream_truncated"


async def test_the_close_is_the_end_where_nothing_else_was_promised() -> None:
    """Neither a length nor chunks."""
    scene = Scene()
    scene.get(b"HTTP/1.1 200 OK\r\n\r\n", b"all of it")
    scene.link.connection_lost(None)
    assert await rest(scene.reply) == b"all of it"
    assert scene.reply.complete


async def test_nonsense_ends_it_at_once() -> None:
    """After what made sense."""
    scene = Scene()
    scene.get(HEAD + chunk(b"good") + b"zz\r\n")
    assert await scene.reply.read() == b"good"
    failure = await ends(scene.reply.read())
    assert failure.refusal.reason == "upstream_error"
    assert scene.socket.aborted


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_compressed_answer_that_is_less_than_it_should_be_is_no_whole_one(damaged: bool) -> None:
    """Though its length is right."""
    packed = bytes.fromhex("1f8b08000000000000ffcb48cdc9c957c840900092ea5b5e") + b"\0\0\0"
    packed = packed[:-1] if not damaged else packed[:15] + b"\xff" + packed[16:]
    scene = Scene()
    scene.get(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed))
    await scene.reply.wait_head()
    assert scene.reply.whole() is None
    assert isinstance(await ends(rest(scene.reply)), UpstreamFailed)
    assert scene.socket.aborted


# -- flow ------------------------------------------------------------------------------------------------------------


async def test_reading_ahead_is_bounded() -> None:
    """A consumer that does not come: the socket is not read until it does."""
    scene = Scene()
    scene.get(HEAD, chunk(b"x" * HIGH_WATER))
    assert scene.socket.reading
    scene.get(chunk(b"y"))
    assert not scene.socket.reading
    assert len(await scene.reply.read()) == HIGH_WATER + 1
    assert scene.socket.reading


async def test_a_slow_client_stops_the_reading_until_it_takes_more() -> None:
    """Also where it was slow before the pump began."""
    scene = Scene()
    out: list[bytes] = []
    scene.get(HEAD)
    scene.reply.pause()
    pumping = asyncio.create_task(scene.reply.pump(lambda data, now: data, out.append))
    await asyncio.sleep(0)
    assert not scene.socket.reading
    scene.reply.resume()
    assert scene.socket.reading
    scene.get(chunk(b"one"), END)
    await pumping
    assert out == [b"one"]


WRITE_SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@STEADY
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), WRITE_SIZES, st.integers(0, 4), st.booleans())
def test_reads_then_pump_give_every_byte_once(chunks: list[bytes], sizes: list[int], reads: int, whole: bool) -> None:
    """However the bytes come in and whenever the reader turns into a pump; what breaks off raises after its last
    byte."""
    data = HEAD + b"".join(map(chunk, chunks)) + (END if whole else b"")
    got: list[bytes] = []

    async def consume(reply: Reply) -> None:
        await reply.wait_head()
        for _ in range(reads):
            if not (piece := await reply.read()):
                return
            got.append(piece)
        await reply.pump(lambda data, now: data, got.append)

    async def play() -> Any:
        scene = Scene()
        task = asyncio.create_task(ends(consume(scene.reply)))
        position = 0
        while position < len(data):
            for size in sizes:
                await asyncio.sleep(0)
                scene.get(data[position : position + size])
                position += size
        await asyncio.sleep(0)
        scene.link.connection_lost(None)
        return await task

    result = asyncio.run(play())
    assert b"".join(got) == b"".join(chunks)
    assert (result is None) == whole
