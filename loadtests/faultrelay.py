"""A TCP relay in front of a backend that misbehaves when it is told to, whatever is behind it."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Weather(StrEnum):
    """What a relay does to its backend's clients. Health probes are GETs, requests are POSTs."""

    FAIR = "fair"
    KILL = "kill"  # nobody listens, and who was connected is reset
    STOP = "stop"  # connections are accepted and nothing passes until it goes on: a stopped process
    HALF_OPEN = "half-open"  # what is sent vanishes, and connections from then stay dead: a path that drops packets
    SLOW = "slow"  # every piece of an answer comes 20 times as late
    ERROR = "error"  # 500 to every request, while its health is fine
    GARBAGE = "garbage"  # no HTTP
    HEADERS = "headers"  # a head that never ends
    RESET = "reset"  # RST in the middle of answers
    TRUNCATE = "truncate"  # FIN in the middle of answers
    FLAP = "flap"  # killed and fair in turn, twice a second
    CLOCK = "clock"  # dates and counters jump back and forth by years, from answer to answer


SLOWER = 20.0
CUT_BYTES = 700  # into an answer
FLAP_S = 0.5
ERROR = b'{"error":{"message":"engine is dead","type":"InternalServerError","param":null,"code":500}}'
FAILED = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
# The same number of bytes each, so that the framing stays true.
DATES = (b"Thu, 01 Jan 1970 00:00:07 GMT", b"Tue, 19 Jan 2038 03:14:07 GMT")
SECONDS = (b"1000000000", b"2147483647")
DATE = re.compile(rb"(?<=\r\ndate: )\w{3}, [^\r\n]{24}")
CREATED = re.compile(rb'(?<="created":)\d{10}')
TOTAL = re.compile(rb"(_total\{[^}\n]*\} )(\d+)(?=\.0\n)")
HARMS = (Weather.ERROR, Weather.GARBAGE, Weather.HEADERS)  # only requests meet these


class Post(NamedTuple):
    """A request that came: when, and its `x-request-id`."""

    at: float
    id: str


@dataclass(eq=False)
class FaultRelay:
    """`await start()`, then set `weather` by `turn`. `posts` are the requests that reached it, `vanished` the ids of
    those that no answer could reach: nobody who waits for one can know that no engine works on it."""

    target_port: int
    port: int = 0
    weather: Weather = Weather.FAIR
    posts: list[Post] = field(default_factory=list)
    vanished: set[str] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _links: set[_Client] = field(default_factory=set)
    _flapping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Client(self), "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def turn(self, weather: Weather) -> None:
        """From now on."""
        if self._flapping is not None:
            self._flapping.cancel()
            self._flapping = None
        self.weather = weather
        if weather is Weather.FLAP:
            self._flapping = asyncio.create_task(self._flap())
        elif weather is Weather.KILL:
            self.stop()
        else:
            await self._stand()
        for link in list(self._links):
            link.weather_changed()

    async def move(self) -> None:
        """Be somewhere else from now on."""
        self.stop()
        self.port = 0
        await self.start()

    def stop(self) -> None:
        """Refuse connections, and reset those that stand."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links):
            link.reset()

    async def _stand(self) -> None:
        if self._server is None:
            await self.start()

    async def _flap(self) -> None:
        while True:
            self.stop()
            await asyncio.sleep(FLAP_S)
            await self._stand()
            await asyncio.sleep(FLAP_S)


def _id(head: bytes) -> str:
    """The id that a request brings; empty: none."""
    _, _, rest = head.partition(b"\r\nx-request-id: ")
    return rest.partition(b"\r\n")[0].decode("latin-1")


def mistimed(data: bytes, *, odd: bool) -> bytes:
    """A piece of an answer by a clock that is decades wrong, one way or the other."""
    data = DATE.sub(DATES[odd], data)
    data = CREATED.sub(SECONDS[odd], data)
    return TOTAL.sub(lambda found: found[1] + (b"9" if odd else b"0") * len(found[2]), data)


def _send(transport: asyncio.Transport | None, data: bytes) -> None:
    """Whoever has gone meanwhile gets nothing."""
    if data and transport is not None and not transport.is_closing():
        transport.write(data)


class _Client(asyncio.Protocol):
    """One connection of the gateway, and the one to the backend that belongs to it."""

    def __init__(self, relay: FaultRelay) -> None:
        self.relay = relay
        self.transport: asyncio.Transport | None = None
        self.backend: asyncio.Transport | None = None
        self.asked_at = 0.0
        self.answered = 0
        self.id = ""  # of the request that came last
        self.dead = False
        self.backend_left = False
        self.put_off: deque[tuple[float, bytes]] = deque()  # what is sent later, and when at the earliest
        self.odd = False  # of two wrong clocks, which one
        self.held: list[bytes] = []
        self.back: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.relay._links.add(self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(lambda: _Backend(self), "127.0.0.1", self.relay.target_port)
        except OSError:
            self.reset()
            return
        self.backend = protocol.transport
        self.weather_changed()

    def data_received(self, data: bytes) -> None:
        weather = self.relay.weather
        if data.startswith((b"POST ", b"GET ")):
            self.asked_at, self.answered, self.odd = time.monotonic(), 0, not self.odd
        if data.startswith(b"POST "):
            self.id = _id(data)
            self.relay.posts.append(Post(time.monotonic(), self.id))
            if self.dead:
                self.relay.vanished.add(self.id)
            if weather in HARMS:
                self._harm(weather)
                return
        if not self.dead:
            self.held.append(data)
            self.weather_changed()

    def weather_changed(self) -> None:
        """Let pass what may pass now."""
        if self.relay.weather is Weather.HALF_OPEN:
            self.dead = True
            self.relay.vanished.add(self.id)
            self.held, self.back = [], []
        if self.relay.weather is Weather.STOP or self.dead:
            return
        if self.backend is not None:
            held, self.held = self.held, []
            _send(self.backend, b"".join(held))
        back, self.back = self.back, []
        _send(self.transport, b"".join(back))
        if self.backend_left:
            self.left()

    def left(self) -> None:
        """The backend closed its side. Who is stopped cannot say so yet, nor who has something to say before that; a
        dead path never can."""
        self.backend_left = True
        waits = self.relay.weather is Weather.STOP or self.dead or self.put_off
        if not waits and self.transport is not None:
            self.transport.close()

    def answer(self, data: bytes) -> None:
        """A piece of the backend's."""
        assert self.transport is not None
        weather, before = self.relay.weather, self.answered
        self.answered += len(data)
        if self.dead:
            return
        if weather is Weather.STOP:
            self.back.append(data)
        elif weather is Weather.SLOW or self.put_off:
            now = time.monotonic()
            self.put_off.append((now + (now - self.asked_at) * (SLOWER - 1) * (weather is Weather.SLOW), data))
            if len(self.put_off) == 1:
                self._send_on()
        elif weather in (Weather.RESET, Weather.TRUNCATE) and self.answered > CUT_BYTES:
            _send(self.transport, data[: max(0, CUT_BYTES - before)])
            self.reset() if weather is Weather.RESET else self.transport.close()
        else:
            _send(self.transport, mistimed(data, odd=self.odd) if weather is Weather.CLOCK else data)

    def _send_on(self) -> None:
        """What was put off and is due, in its order: timers of one moment have none."""
        now = time.monotonic()
        while self.put_off and self.put_off[0][0] <= now:
            _send(self.transport, self.put_off.popleft()[1])
        if self.put_off:
            asyncio.get_running_loop().call_later(self.put_off[0][0] - now, self._send_on)
        elif self.backend_left:
            self.left()

    def _harm(self, weather: Weather) -> None:
        assert self.transport is not None
        if weather is Weather.ERROR:
            _send(self.transport, FAILED % (len(ERROR), ERROR))
        elif weather is Weather.GARBAGE:
            _send(self.transport, b"\x16\x03\x01\x02 this is no HTTP\r\n\r\n")
            self.transport.close()
        else:
            _send(self.transport, b"HTTP/1.1 200 OK\r\n")
            self._endless()

    def _endless(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"x-filler: %b\r\n" % (b"y" * 500) * 20)
            asyncio.get_running_loop().call_later(0.01, self._endless)

    def reset(self) -> None:
        """Close with RST."""
        if self.transport is not None:
            sock: socket.socket = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.relay._links.discard(self)
        self._connecting.cancel()
        if self.backend is not None:
            self.backend.abort()


class _Backend(asyncio.Protocol):
    def __init__(self, client: _Client) -> None:
        self.client = client
        self.transport: asyncio.Transport | None = None

    def data_received(self, data: bytes) -> None:
        self.client.answer(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if self.client.transport is None or self.client.transport.is_closing():
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.client.left()
