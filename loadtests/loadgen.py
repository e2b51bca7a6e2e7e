"""Raw clients of the benches: they read as little of an answer as counting it needs.

A client that parsed every event would cost more than the proxies that it measures. So: an answer is complete when its
declared length has come (or the last chunk of a chunked one), an event is a blank line, and the first token is the
second event, the first being the role.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from loadtests.origin import CONTENT_LENGTH, LAST_CHUNK, MODEL

Clock = Callable[[], float]

# As long as a short chat turn: the envelope is what a proxy parses.
PROMPT = "The headrace brings the water to the turbines, and what it cannot carry it holds back. " * 4
FIRST_TOKEN_EVENT = 2
# Connections opened at a time: a whole crowd at once measures the listen queue instead. Not much fewer, since some
# routers hold the first token back for a second when nothing follows it.
OPENED_AT_ONCE = 100


class LoadFailed(Exception):
    """The target did not do what the phase needs, so that its figures would mean nothing."""


def request(key: str, kind: str | None = None) -> bytes:
    """A chat request of about 0.6 KB. `kind` asks the origin for a kind of stream; None for a JSON answer."""
    messages = [{"role": "user", "content": PROMPT}]
    body: dict[str, object] = {"model": MODEL, "messages": messages, "max_tokens": 512}
    if kind is not None:
        messages.insert(0, {"role": "system", "content": kind})
        body["stream"] = True
    encoded = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n".encode() + encoded


@dataclass(slots=True)
class Tally:
    """What the clients of one phase saw; counted only while `recording`. Times in seconds."""

    clock: Clock
    recording: bool = False
    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    events: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def all_gaps(self) -> list[float]:
        """The gap before every event: events that came in one read have none between them."""
        return self.gaps + [0.0] * (self.events - len(self.gaps))


class Client(asyncio.Protocol):
    """One connection to the target, with the request to send on it."""

    transport: asyncio.Transport

    def __init__(self, sent: bytes, tally: Tally) -> None:
        self.sent = sent
        self.tally = tally
        self.closing = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closing:
            self.fail(f"lost: {exc or 'end of stream'}")

    def send(self) -> None:
        self.started = self.tally.clock()
        self.transport.write(self.sent)

    def began(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def fail(self, why: str) -> None:
        """Count it; nothing more is sent on this connection."""
        self.tally.failures[why] += 1
        if not self.opened.done():
            self.opened.set_exception(LoadFailed(why))
        self.close()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.transport.abort()


class Caller(Client):
    """A closed loop: the next request goes out when the answer to the last one is complete."""

    def __init__(self, sent: bytes, tally: Tally) -> None:
        super().__init__(sent, tally)
        self.answer = b""

    def data_received(self, data: bytes) -> None:
        answer = self.answer = self.answer + data if self.answer else data
        head = answer.find(b"\r\n\r\n") + 4
        if head < 4:
            return None
        if not answer.startswith(b"HTTP/1.1 200"):
            return self.fail(answer[:15].decode("latin-1"))
        if declared := CONTENT_LENGTH.search(answer, 0, head):
            if len(answer) < head + int(declared[1]):
                return None
        elif not answer.endswith(LAST_CHUNK):
            return None
        self.answer = b""
        self.began()
        if self.tally.recording:
            self.tally.latencies.append(self.tally.clock() - self.started)
        return self.send()


class Reader(Client):
    """One stream. With `pause_s` it is asked for again, that long after its end."""

    def __init__(self, sent: bytes, tally: Tally, *, pause_s: float | None = None) -> None:
        super().__init__(sent, tally)
        self.pause_s = pause_s
        self.seen = 0
        self.last = 0.0

    def data_received(self, data: bytes) -> None:
        events = data.count(b"\n\n")
        tally = self.tally
        now = tally.clock()
        if self.seen < FIRST_TOKEN_EVENT:
            if not self.seen and not data.startswith(b"HTTP/1.1 200") and data.startswith(b"HTTP/"):
                return self.fail(data[:15].decode("latin-1"))
            if self.seen + events >= FIRST_TOKEN_EVENT:
                self.began()
                if tally.recording:
                    tally.first_tokens.append(now - self.started)
        elif events and tally.recording:
            tally.gaps.append(now - self.last)
            tally.events += events
        self.seen += events
        self.last = now
        if self.pause_s is not None and data.endswith(LAST_CHUNK):
            self.seen = 0
            asyncio.get_running_loop().call_later(self.pause_s, self.again)
        return None

    def again(self) -> None:
        if not self.closing:
            self.send()


class Sleeper(Client):
    """A client that asks and never reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self.began()


@dataclass(slots=True)
class Crowd:
    """The clients of one phase, closed together when the block ends: `async with Crowd(port) as crowd`."""

    port: int
    clients: list[Client] = field(default_factory=list)

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()

    async def join(self, number: int, make: Callable[[], Client], limit_s: float = 120.0) -> None:
        """Open `number` more connections and wait until each has begun. Raises LoadFailed when one cannot."""
        try:
            async with asyncio.timeout(limit_s):
                for start in range(0, number, OPENED_AT_ONCE):
                    size = min(OPENED_AT_ONCE, number - start)
                    await asyncio.gather(*(self.open(make) for _ in range(size)))
        except TimeoutError as exc:
            raise LoadFailed(f"{number} clients were not served within {limit_s:g} s") from exc
        except OSError as exc:
            raise LoadFailed(f"cannot connect: {exc}") from exc

    async def open(self, make: Callable[[], Client]) -> None:
        _, client = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self.port)
        self.clients.append(client)
        await client.opened
