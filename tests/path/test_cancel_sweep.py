"""A request that is cancelled, or whose client leaves, or whose gateway stops, at its n-th await, for n = 1, 2, 3 ...
until it completes: after each of them everything is given back, exactly one record is written, and the next request is
served."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, Script, completion, event, healthy, streaming
from tests.faults.process import pool
from tests.faults.rawclient import chat
from tests.path.house import AtAwait, House, Wire

pytestmark = pytest.mark.anyio

HEDGE_S = 0.004
TWO: dict[str, Any] = {"stream": True, "backends": 2, "attempts": 2, "hedged": True}
MOST_AWAITS = 60  # more than any request here has: the sweep must come to an end by itself


def failing(times: float = math.inf) -> Script:
    """Asks to be left alone, the first `times` times, whichever backend plays it; then is healthy."""
    failed = 0

    async def script(connection: FakeConnection) -> None:
        nonlocal failed
        if failed >= times:
            await healthy(connection)
        await connection.request()
        failed += 1
        await connection.answer(b"{}", "503 Service Unavailable")

    return script


async def refusing(connection: FakeConnection) -> None:
    """Blames the request."""
    while True:
        await connection.request()
        await connection.answer(b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}', "400 Bad Request")


async def cutting(connection: FakeConnection) -> None:
    """Breaks off after two tokens."""
    await connection.request()
    await connection.stream_head()
    await connection.chunk(event("t0"))
    await connection.chunk(event("t1"))
    connection.fin()


async def unanswering(connection: FakeConnection) -> None:
    """Answers the first request of a connection; closes it on the second one, before a byte."""
    await connection.request()
    await connection.answer(completion())
    await connection.request()
    connection.fin()


async def sluggish(connection: FakeConnection) -> None:
    """Takes nothing of a request at first."""
    while True:
        await asyncio.sleep(0.005)
        await connection.request()
        await connection.answer(completion())


async def long_winded(connection: FakeConnection) -> None:
    """A stream of more than anybody buffers."""
    await connection.request()
    await connection.stream_head()
    for _ in range(16):
        await connection.chunk(event("x" * 20_000))
    await connection.chunk(event(finish="stop") + DONE)
    await connection.last_chunk()


async def halting(connection: FakeConnection) -> None:
    """Every piece of the answer comes by itself."""
    request = await connection.request()
    stream = request.json()["stream"]
    body = [event("t0"), event("t1"), event(finish="stop"), DONE] if stream else [b'{"choices":', b"[]", b"}"]
    await connection.head(
        content_type="text/event-stream" if stream else "application/json", transfer_encoding="chunked"
    )
    for piece in body:
        await asyncio.sleep(0.002)
        await connection.chunk(piece[:5])
        await asyncio.sleep(0.002)
        await connection.chunk(piece[5:])
    await asyncio.sleep(0.002)
    await connection.last_chunk()


async def long_body(connection: FakeConnection) -> None:
    """A JSON answer that is too large to be held back, of unknown length."""
    await connection.request()
    await connection.head(content_type="application/json", transfer_encoding="chunked")
    for piece in (b'{"choices":[],"pad":"', *[b"x" * 40_000] * 4, b'"}'):
        await connection.chunk(piece)
    await connection.last_chunk()


def two(first: Script, second: Script) -> Script:
    """The first connection plays one script, the next the other, whichever backends they reach; then all is well. What
    stops when it is closed may wait till then."""
    turns = [first, second]

    async def script(connection: FakeConnection) -> None:
        await (turns.pop(0) if turns else healthy)(connection)

    return script


def late(script: Script) -> Script:
    """The same after some time, in which a second attempt begins."""

    async def later(connection: FakeConnection) -> None:
        await asyncio.sleep(2.5 * HEDGE_S)
        await script(connection)

    return later


@dataclass(frozen=True)
class Scene:
    """What the backends do, how the request is sent, what else happens, and how it ends undisturbed."""

    script: Callable[[], Script] = lambda: healthy
    stream: bool = False
    body_bytes: int = 0
    pieces: int = 1  # in which the request arrives
    holder: bool = False  # another request holds the only place for a moment
    warm: bool = False  # there is an idle connection
    slow: bool = False  # the client does not read at first
    backends: int = 1
    status: int = 200
    attempts: int = 1
    awaits: int = 2  # at least: the connection, and the answer
    hedged: bool = False


SCENES = {
    "json": Scene(),
    "stream": Scene(stream=True),
    "halting": Scene(lambda: halting, awaits=4),
    "halting stream": Scene(lambda: halting, stream=True, awaits=4),
    "stream in one piece": Scene(lambda: streaming(event("t") + event(finish="stop") + DONE), stream=True),
    "body in pieces": Scene(stream=True, pieces=4, awaits=3),
    "large body": Scene(lambda: sluggish, body_bytes=4_500_000, pieces=3, awaits=5),
    "warm connection": Scene(warm=True, awaits=1),
    "dead connection": Scene(lambda: unanswering, warm=True),
    "queue": Scene(holder=True, awaits=3),
    "queue, stream": Scene(holder=True, stream=True, awaits=3),
    "retry after a 503": Scene(lambda: failing(1), backends=2, attempts=2, awaits=5),
    "retry after a 503, stream": Scene(lambda: failing(1), backends=2, stream=True, attempts=2, awaits=5),
    "all fail": Scene(failing, backends=2, status=503, attempts=2, awaits=5),
    "refused": Scene(lambda: refusing, status=400),
    "cut": Scene(lambda: cutting, stream=True),
    "slow reader": Scene(lambda: long_winded, stream=True, slow=True),
    "long answer": Scene(lambda: long_body),
    "long answer, slow reader": Scene(lambda: long_body, slow=True),
}
HEDGED = {
    "the second wins": Scene(lambda: two(silent_after_head, halting), **TWO),
    "the first wins": Scene(lambda: two(late(halting), silent_after_head), **TWO),
    "both at a time": Scene(lambda: two(late(halting), late(halting)), **TWO),
    "the first fails": Scene(lambda: two(late(failing(1)), late(halting)), **TWO),
    "the second fails": Scene(lambda: two(late(late(halting)), failing(1)), **TWO),
    "both fail": Scene(lambda: two(late(failing(1)), late(failing(1))), **(TWO | {"status": 503})),
    "the winner breaks": Scene(lambda: two(silent_after_head, cutting), **TWO),
}
HOW = ("cancelled", "cancelled late", "left", "left late", "cancelled and left", "stopped", "stopped late")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SCENES | HEDGED)
async def test_a_request_that_ends_at_its_nth_await_leaves_nothing(name: str, how: str) -> None:
    """In every phase, by cancellation, leaving or stopping, at the await or just as it is over."""
    await swept((SCENES | HEDGED)[name], how, interrupted)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", HEDGED)
async def test_a_request_that_ends_at_the_nth_await_of_its_second_attempt_leaves_nothing(name: str, how: str) -> None:
    """The same, seen from the task beside the request's own."""
    await swept(HEDGED[name], how, partial(interrupted, beside=True))


async def swept(scene: Scene, how: str, interrupted: Callable[[House, Scene, int, str], Awaitable[bool]]) -> None:
    async with Fake(healthy, narrow=True) as a, Fake(healthy) as b:
        fakes = [a, b][: scene.backends]
        retries = {"budget": "100%"} | ({"hedge": {"after": f"{HEDGE_S * 1000:g}ms"}} if scene.hedged else {})
        config = pool(*(fake.url for fake in fakes), concurrency=1, retries=retries)
        for n in range(1, MOST_AWAITS):
            script = scene.script()
            for fake in fakes:
                await fake.play(script)
            async with House(config, fakes) as house:
                fired = await interrupted(house, scene, n, how)
            assert house.faults == []
            if not fired:
                break
        gc.collect()  # an exception that nobody retrieved fails the test here
        assert scene.awaits < n < MOST_AWAITS - 1


async def interrupted(house: House, scene: Scene, n: int, how: str, *, beside: bool = False) -> bool:
    """One request that ends at its n-th await, or with `beside` at that of its second attempt; False if it completed
    before."""
    if scene.warm:
        assert (await house.ask(chat())).status == 200
    holder = await held(house) if scene.holder else None
    house.lines.clear()
    wire = house.connect()
    wire.taking = not scene.slow
    drive: AtAwait | None = None

    def driven(coroutine: Any, task: asyncio.Task[Any]) -> AtAwait:
        nonlocal drive
        drive = AtAwait(coroutine, n, partial(end, house, wire, task, how), late=how.endswith("late"))
        return drive

    async def around(coroutine: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if beside:
            with seconds(lambda second: driven(second, task)):
                await coroutine
        else:
            await driven(coroutine, task)

    house.around = around
    await send(wire, chat("X-Request-Id: swept", stream=scene.stream, user="u" * scene.body_bytes), scene.pieces)
    if holder is not None:
        await asyncio.sleep(0.002)
        holder.leave()
    if scene.slow:
        await asyncio.sleep(0.05)
        wire.take()
    await house.eventually(lambda: not house.remains(), "everything is given back")
    count = 2 if scene.holder else 1
    await house.eventually(lambda: len(house.lines) == count, "one record for each request")
    (line,) = (line for line in house.lines if line["request_id"] == "swept")
    assert drive is not None
    fired = drive.awaits >= n
    if not fired:
        assert (wire.response().status, line["attempts"]) == (scene.status, scene.attempts)
        assert line["outcome"] not in ("client_disconnect", "shutting_down")
    elif how.startswith("cancelled"):
        assert line["outcome"] == "shutting_down"
    elif "left" in how and not any(word in wire.sent for word in (b'"stop"', b'"error"')):
        # who has the finish reason, or was told of a break, has its whole answer
        assert line["outcome"] == "client_disconnect"
    assert line["outcome"] != "internal_error"
    wire.leave()
    if not how.startswith("stopped"):
        await served(house)
    return fired


@contextmanager
def seconds(drive: Callable[[Any], Awaitable[None]]) -> Iterator[None]:
    """Second attempts that begin are driven by `drive`."""

    async def driven(coroutine: Any) -> None:
        await drive(coroutine)

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **told: Any) -> asyncio.Task[Any]:
        second = coroutine.__name__ == "_try_beside"
        return asyncio.Task(driven(coroutine) if second else coroutine, loop=loop, **told)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(None)


def end(house: House, wire: Wire, task: asyncio.Task[Any], how: str) -> None:
    if how.startswith("stopped"):
        house.gateway.stop_queueing()
        house.gateway.stop_running()
    if how.startswith("cancelled"):
        task.cancel()
    if "left" in how:
        wire.leave()


async def send(wire: Wire, request: bytes, pieces: int) -> None:
    size = -(-len(request) // pieces)
    for start in range(0, len(request), size):
        wire.feed(request[start : start + size])
        await asyncio.sleep(0.001 if pieces > 1 else 0)


async def held(house: House) -> Wire:
    """A request that holds the only place until its client leaves."""
    fake = house.fakes[0]
    script, fake.script = fake.script, silent_after_head
    wire = house.connect()
    wire.feed(chat(stream=True))
    await house.eventually(lambda: fake.hits, "the place is taken")
    fake.script = script
    return wire


async def silent_after_head(connection: FakeConnection) -> None:
    await connection.request()
    await connection.stream_head()
    await connection.wait_closed()


async def served(house: House) -> None:
    """As many requests as there are places, all at once, are served by healthy backends."""
    for fake in house.fakes:
        await fake.play(healthy)
    for _ in house.fakes:
        assert (await house.ask(chat())).status == 200
    await house.eventually(lambda: not house.remains(), "everything is given back")
