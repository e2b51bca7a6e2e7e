"""Server-sent events to everybody who watches: one task makes them, once a second, while anybody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BEAT_S = 1.0
MOST = 32  # viewers at once: a page that is left open in every browser of a company


class Feed:
    """The latest event, and the future of the next. A viewer that reads slowly misses events; none is kept for it."""

    def __init__(self, make: Callable[[], bytes], beat_s: float = BEAT_S) -> None:
        self._make = make
        self._beat_s = beat_s
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        self._latest = b""
        self._closed = False

    def __repr__(self) -> str:
        return f"<Feed {self._viewers} viewers, {'running' if self._task else 'at rest'}>"

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._viewers)

    @property
    def full(self) -> bool:
        """Whether nobody else may watch."""
        return self._closed or self._viewers >= MOST

    @contextmanager
    def joined(self) -> Iterator[bytes]:
        """While somebody watches. Yields the latest event, so that nobody waits for the first one."""
        if self._task is None:
            self._latest = self._event()
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)
        self._viewers += 1
        try:
            yield self._latest
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def wait_next(self) -> bytes | None:
        """The next event, within `joined`; None when there will be no more."""
        assert self._next is not None
        return None if self._closed else (await asyncio.shield(self._next) or None)

    def close(self) -> None:
        """All viewers are told that it is over."""
        self._closed = True
        if self._next is not None and not self._next.done():
            self._next.set_result(b"")

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fault in the making is the viewers' to hear of, not to wait for."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._task = None
            if self._next is not None and not self._next.done():
                self._next.set_exception(error)

    async def _run(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._beat_s)
            assert self._next is not None
            self._latest = self._event()
            self._next, now = asyncio.get_running_loop().create_future(), self._next
            if not now.done():
                now.set_result(self._latest)

    def _event(self) -> bytes:
        return b"data: " + self._make() + b"\n\n"


class Events:
    """An ASGI response: the events of a feed until the client leaves, or the feed is closed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        with self._feed.joined() as latest:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": latest, "more_body": True})
            left = asyncio.ensure_future(_left(receive))
            try:
                await self._relay(left, send)
            finally:
                left.cancel()
        if not left.done() or left.cancelled():
            await send({"type": "http.response.body", "body": b""})

    async def _relay(self, left: asyncio.Future[None], send: Any) -> None:
        while not left.done():
            coming = asyncio.ensure_future(self._feed.wait_next())
            await asyncio.wait((left, coming), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                return
            event = coming.result()
            if event is None:
                return
            await send({"type": "http.response.body", "body": event, "more_body": True})


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
