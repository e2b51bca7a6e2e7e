"""The whole gateway in process, between clients on scripted transports and backends of exact bytes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from gateway.app import Gateway
from gateway.config import parse
from gateway.connection import Connection, HeadLimits
from gateway.rest import api
from gateway.turn import Turn
from gateway.wire import ENDPOINTS
from tests.faults.fakes import Fake
from tests.faults.rawclient import Response


class Wire(asyncio.Transport):
    """A client's side of a connection. The test says what comes in, whether the client reads, and when it leaves; what
    the gateway writes is kept in `sent`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.sent = bytearray()
        self.taking = True
        self.closed = False
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._high = 64 * 1024
        self._waiting = bytearray()
        self._closing = self._writing_paused = self._reading_paused = self._left = False
        self._unread: list[bytes] = []
        protocol.connection_made(self)

    # -- the client ---------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """The client sends."""
        if self._reading_paused:
            self._unread.append(data)
        elif not self.closed:
            self._protocol.data_received(data)

    def leave(self) -> None:
        """The client resets the connection: seen at once, unless nobody looks."""
        self._left = True
        if not self._reading_paused:
            self._lose(ConnectionResetError())

    def take(self) -> None:
        """The client reads on, all that waits for it."""
        self.taking = True
        self.sent += self._waiting
        self._waiting.clear()
        if self._writing_paused:
            self._writing_paused = False
            self._protocol.resume_writing()
        if self._closing:
            self._loop.call_soon(self._lose, None)

    def response(self) -> Response:
        """What has come of the first response; h11 judges it."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        parser.send(h11.EndOfMessage())
        response = Response()
        if not self.sent:
            return response
        parser.receive_data(bytes(self.sent))
        if self.closed:
            parser.receive_data(b"")
        with suppress(h11.RemoteProtocolError):  # the gateway broke it off
            self._note(parser, response)
        return response

    @staticmethod
    def _note(parser: h11.Connection, response: Response) -> None:
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                response.status = event.status_code
                response.headers = [(name.decode(), value.decode()) for name, value in event.headers]
            elif isinstance(event, h11.Data):
                response.pieces.append((0.0, bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                response.complete = True
            elif isinstance(event, h11.ConnectionClosed):
                break

    # -- asyncio.Transport --------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        assert not self.closed, "written to a client that has left"
        if self.taking:
            self.sent += data
            return
        self._waiting += data
        if len(self._waiting) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def is_closing(self) -> bool:
        return self._closing or self.closed

    def close(self) -> None:
        self._closing = True
        if not self._waiting:
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = self._closing = True
            self._protocol.connection_lost(error)

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._loop.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        while self._unread and not self._reading_paused and not self.closed:
            self._protocol.data_received(self._unread.pop(0))
        if self._left and not self._reading_paused:
            self._lose(ConnectionResetError())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or self._high

    def get_write_buffer_size(self) -> int:
        return len(self._waiting)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass


class AtAwait:
    """Runs a coroutine. When it is suspended for the `n`-th time `act` is called: at once, or `late`, when what it
    waits for has come and it is just about to go on."""

    def __init__(self, coroutine: Any, n: int, act: Callable[[], object], *, late: bool) -> None:
        self._coroutine = coroutine
        self._n = n
        self._act = act
        self._late = late
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        step, argument = self._coroutine.send, None
        while True:
            try:
                future = step(argument)
            except StopIteration as stop:
                return stop.value
            self.awaits += 1
            if self.awaits == self._n:
                if self._late and future is not None:
                    future.add_done_callback(lambda _: self._act())  # before the task's own, which wakes it up
                else:
                    asyncio.get_running_loop().call_soon(self._act)
            try:
                step, argument = self._coroutine.send, (yield future)
            except BaseException as error:
                step, argument = self._coroutine.throw, error


class House:
    """`async with House(config, fakes) as house`: a gateway, and a way in. `around` may drive a request's coroutine."""

    def __init__(self, config: dict[str, Any], fakes: Sequence[Fake]) -> None:
        self.turns = 0  # requests that were begun
        self.lines: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.fakes = fakes
        self.around: Callable[[Any], Awaitable[None]] | None = None
        self.gateway = Gateway(parse(json.dumps(config)), lambda line: self.lines.append(json.loads(line)))
        self._state = ServerState()
        self._config = uvicorn.Config(
            api(self.gateway),
            interface="asgi3",
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )

    async def __aenter__(self) -> House:
        self._log = logging.Handler(logging.ERROR)
        self._log.emit = lambda record: self.faults.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(self._log)
        loop = asyncio.get_running_loop()
        self._handler = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        await self.gateway.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.gateway.__aexit__(*exc)
        asyncio.get_running_loop().set_exception_handler(self._handler)
        logging.getLogger().removeHandler(self._log)

    async def _infer(self, turn: Turn) -> None:
        self.turns += 1
        request = self.gateway.infer(turn)
        around, self.around = self.around, None
        await (around(request) if around else request)

    def protocol(self) -> Connection:
        """What serves one client."""
        endpoints = {endpoint.target: endpoint for endpoint in ENDPOINTS.values()}
        return Connection(self._config, self._state, {}, limits=HeadLimits(), endpoints=endpoints, infer=self._infer)

    def connect(self) -> Wire:
        """A client comes."""
        return Wire(self.protocol())

    async def ask(self, request: bytes) -> Response:
        """One whole request on a connection of its own."""
        wire = self.connect()
        wire.feed(request)
        await self.eventually(lambda: wire.response().complete, "the response is complete")
        response = wire.response()
        wire.leave()
        return response

    async def eventually(self, condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {self.remains()}, {self.lines[-2:]}"
            await asyncio.sleep(0.001)

    def remains(self) -> list[str]:
        """What is left of requests: nothing, if none is under way."""
        gateway = self.gateway
        left = [f"active: {exchange}" for exchange in gateway.active]
        for pool in gateway.dispatcher.pools.values():
            now = pool.statistics()
            busy = any(each.running or each.in_flight_tokens or each.kv_tokens for each in now.backends.values())
            if busy or any(now.queued.values()) or pool.waiting:
                left.append(repr(pool))
        if gateway.buffers.used:
            left.append(repr(gateway.buffers))
        found = re.fullmatch(r"<Upstream \[(\d+) replies, (\d+) idle connections]>", repr(gateway.upstream))
        assert found
        connections = sum(len(fake.tasks) for fake in self.fakes)
        if int(found[1]) or connections > int(found[2]) or any(fake.open_requests for fake in self.fakes):
            left.append(f"{gateway.upstream!r}, {connections} connections at the backends")
        return left
