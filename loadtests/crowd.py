"""Clients of all kinds at a rate. Each judges its own answer: was it whole, or did it say truthfully why not?"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

PATIENCE_S = 90.0
# A connection that broke, a head without an end, and a body that is no JSON, or has not the shape that was promised.
BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, LookupError, TypeError)
WORDS = "one two three four five six seven eight nine ten".split()


@dataclass(slots=True)
class Told:
    """What one client saw. Times are monotonic seconds. `lie`: why its answer broke the rules; empty: it did not."""

    sent_at: float
    stream: bool
    id: str = ""
    status: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    begun: bool = False  # a token came
    whole: bool = False
    left: bool = False
    code: str = ""
    reason: str = ""
    backend: str = ""
    lie: str = ""


@dataclass
class Crowd:
    """Requests go to `port`, mixed by `rng`: streams and whole answers, short and
    long prompts with shared beginnings, interactive and batch, and some clients that leave."""

    port: int
    per_s: float
    rng: Random
    key: str = ""
    leave: float = 0.02
    told: list[Told] = field(default_factory=list)
    sent: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # how
    lies: list[str] = field(default_factory=list)
    going: set[asyncio.Task[None]] = field(default_factory=set)
    ids: Iterator[int] = field(default_factory=count)

    async def run(self, seconds: float) -> None:
        """Send at the rate for so long; who is still served then goes on."""
        begun = time.monotonic()
        due = begun
        while due < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self._one())
            self.going.add(task)
            task.add_done_callback(self.going.discard)
            due += self.rng.expovariate(self.per_s)

    def count(self) -> None:
        """Keep the sums only: a long run would remember every client."""
        self.sent += len(self.told)
        self.failed += Counter(
            f"{each.status} {each.reason or each.code}" for each in self.told if not (each.left or each.whole)
        )
        self.lies += [each.lie for each in self.told if each.lie]
        self.told.clear()

    async def finish(self) -> None:
        """Until everybody has been answered."""
        await asyncio.gather(*self.going, return_exceptions=True)

    async def _one(self) -> None:
        rng = self.rng
        stream = rng.random() < 0.7
        told = Told(time.monotonic(), stream, f"crowd-{next(self.ids)}")
        self.told.append(told)
        topic = f"topic {rng.randrange(8)} " + " ".join(WORDS) * 20
        words = " ".join(rng.choices(WORDS, k=rng.choice((10, 50, 300))))
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": f"{topic} {words}"}],
            "max_tokens": rng.choice((5, 20, 40)),
            "stream": stream,
        }
        if rng.random() < 0.1:
            body["service_tier"] = "flex"
        stays_s = rng.uniform(0.0, 0.3) if rng.random() < self.leave else PATIENCE_S
        try:
            async with asyncio.timeout(stays_s):
                await self._ask(body, told)
        except TimeoutError:
            told.left = True
            if stays_s == PATIENCE_S:
                told.lie = f"no end after {PATIENCE_S:g} s"
        except BROKEN as error:
            told.lie = f"broken: {error!r}"
        told.ended_at = time.monotonic()

    async def _ask(self, body: dict[str, Any], told: Told) -> None:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            token = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {told.id}\r\n{token}"
            head += f"Content-Length: {len(data)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            told.backend, told.reason = _field(lines, "x-headrace-backend"), _field(lines, "x-headrace-reason")
            told.status = int(lines.split(" ", 2)[1])
            if told.status != 200:
                self._refused(await reader.read(), lines, told)
            elif "text/event-stream" in lines:
                await self._events(reader, told)
            else:
                answer = await reader.read()
                told.first_at = time.monotonic()
                told.whole = json.loads(answer)["choices"][0]["finish_reason"] is not None
                if not told.whole:
                    told.lie = f"an answer without its end: {answer[-100:]!r}"
        finally:
            writer.transport.abort()

    @staticmethod
    def _refused(body: bytes, head: str, told: Told) -> None:
        error = json.loads(body)["error"]
        told.code = str(error["code"])
        if told.status in (429, 503) and "retry-after:" not in head:
            told.lie = f"{told.status} without Retry-After"

    @staticmethod
    async def _events(reader: asyncio.StreamReader, told: Told) -> None:
        text = b""
        while data := await reader.read(65536):
            if not told.begun and b'"content":"' in data:
                told.begun, told.first_at = True, time.monotonic()
            text += data
        told.whole = b'"finish_reason":"' in text and b"data: [DONE]" in text
        failed = b'data: {"error"' in text
        if failed:
            told.code = "error frame"
        if told.whole == failed:
            told.lie = f"a stream that ended {'with two ends' if failed else 'without its end'}: {text[-100:]!r}"
        if not text.rstrip().endswith(b"0"):
            told.lie = told.lie or "a chunked body without its last chunk"


def _field(head: str, name: str) -> str:
    """The value of a header; empty if it is absent."""
    _, _, rest = head.partition(f"\r\n{name}: ")
    return rest.partition("\r\n")[0]
