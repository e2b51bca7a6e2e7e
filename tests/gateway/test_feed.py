"""Events are made while somebody watches, once for all."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from gateway.feed import MOST, Events, Feed

pytestmark = pytest.mark.anyio


class Viewer:
    """An ASGI client of one stream."""

    def __init__(self, feed: Feed) -> None:
        self.got: list[bytes] = []
        self.ended = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(Events(feed)({}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self.got.append(message["body"])
            self.ended = not message.get("more_body")

    async def leave(self) -> None:
        self._leave.set()
        await self.task

    async def see(self, number: int) -> None:
        """Until it has so many events."""
        async with asyncio.timeout(10):
            while len(self.got) < number:
                await asyncio.sleep(0.001)


def numbered(beat_s: float = 0.01) -> tuple[Feed, list[int]]:
    """A feed that counts what it makes."""
    numbers, made = count(1), list[int]()

    def make() -> bytes:
        made.append(next(numbers))
        return b"%d" % made[-1]

    return Feed(make, beat_s), made


async def test_nothing_is_made_when_nobody_looks() -> None:
    """Neither before the first viewer nor after the last."""
    feed, made = numbered()
    assert "at rest" in repr(feed) and not made
    viewer = Viewer(feed)
    await viewer.see(2)
    await viewer.leave()
    told = len(made)
    await asyncio.sleep(0.05)
    assert len(made) == told and "0 viewers, at rest" in repr(feed)
    again = Viewer(feed)
    await again.see(1)
    await again.leave()


async def test_all_viewers_get_the_same_events() -> None:
    """Made once, however many look; who leaves does not disturb the others."""
    feed, made = numbered()
    viewers = [Viewer(feed) for _ in range(5)]
    for viewer in viewers:
        await viewer.see(3)
    await viewers[0].leave()
    await viewers[1].see(6)
    assert viewers[1].got[0] == b"data: 1\n\n"
    assert len(made) <= max(len(viewer.got) for viewer in viewers) + 1
    for viewer in viewers[1:]:
        await viewer.leave()
    assert not any(viewer.ended for viewer in viewers)


async def test_an_end_is_told_to_who_watches() -> None:
    """The streams end as answers do, and nobody may come any more."""
    feed, _ = numbered(beat_s=60)
    viewer = Viewer(feed)
    await viewer.see(1)
    feed.close()
    async with asyncio.timeout(10):
        await viewer.task
    assert viewer.ended and feed.full


async def test_a_fault_in_the_making_ends_the_streams() -> None:
    """Nobody waits for what will never come, and the next viewer tries anew."""
    divisors = iter((1, 0, 1, 0, 0))
    feed = Feed(lambda: b"%d" % (1 // next(divisors)), 0.01)
    for _ in range(3):
        viewer = Viewer(feed)
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(10):
                await viewer.task
    assert "0 viewers" in repr(feed)


async def test_viewers_are_bounded() -> None:
    """So many, and then no more until one leaves."""
    feed, _ = numbered(beat_s=60)
    viewers = [Viewer(feed) for _ in range(MOST)]
    for viewer in viewers:
        await viewer.see(1)
    assert feed.full
    await viewers[0].leave()
    assert not feed.full
    for viewer in viewers[1:]:
        await viewer.leave()
