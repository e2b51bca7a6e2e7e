"""Backends of exact bytes: each test scripts what one sends, when it pauses, and how it closes.

A script is a coroutine that gets a `FakeConnection` for every connection that is made. Whatever happens is written to
the fake's journal with its time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["FakeConnection"], Awaitable[None]]
Control = Callable[["Request"], "tuple[int, bytes] | None"]


@dataclass(frozen=True)
class Request:
    """A request as it arrived: names in lower case, values and body byte for byte."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    at: float

    def header(self, name: str) -> str | None:
        """The one value of a header; None if it is absent."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Closed:
    """How the gateway closed a connection."""

    at: float
    reset: bool
    served: int


@dataclass
class Fake:
    """One backend. `async with Fake(script) as fake` listens on `fake.url`. A `narrow` one takes no more of a request
    than some 100 KiB ahead of its script. With a `control` the gateway's own questions are answered by it, by a status
    and a body or, where it says None, never; they are `probes` and not `requests`."""

    script: Script
    host: str = "127.0.0.1"
    port: int = 0
    narrow: bool = False
    control: Control | None = None
    probes: list[Request] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)
    accepts: int = 0
    open_requests: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def hits(self) -> int:
        """Requests read whole."""
        return len(self.requests)

    async def __aenter__(self) -> Fake:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if it was stopped."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.narrow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        sock.bind((self.host, self.port))
        limit = 2**15 if self.narrow else 2**26
        self._server = await asyncio.start_server(self._accept, sock=sock, backlog=4096, limit=limit)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and drop those that are open."""
        assert self._server is not None
        self._server.close()
        await self._drop()

    async def play(self, script: Script) -> None:
        """Drop all connections and go on with another script and an empty journal."""
        await self._drop()
        self.script = script
        self.requests, self.closed, self.errors, self.accepts = [], [], [], 0

    async def _drop(self) -> None:
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def forget(self) -> None:
        """Drop all connections and the journal; go on listening."""
        await self.stop()
        self.requests.clear()
        self.closed.clear()
        self.accepts = 0
        await self.start()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.accepts += 1
        connection = FakeConnection(self, reader, writer)
        try:
            await self.script(connection)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except Exception as error:  # what a script asserts fails its test, in `settled`
            self.errors.append(error)
        finally:
            connection.finish()
            writer.transport.abort()
            self.tasks.discard(task)
            # A reset that nobody asked about is reported when the garbage collector finds it, in whatever test that is.
            with suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


class FakeConnection:
    """One connection that the gateway made."""

    def __init__(self, fake: Fake, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.fake = fake
        self.served = 0
        self._reader = reader
        self._writer = writer
        self._open = False
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.transport.set_write_buffer_limits(high=0)  # what was sent is sent, also if the script ends with it
        self._sock = sock

    async def request(self) -> Request:
        """The next request, body and all. IncompleteReadError once the gateway has closed."""
        self.finish()
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            self.fake.closed.append(Closed(time.monotonic(), False, self.served))
            raise
        start, *lines = head.split("\r\n")[:-2]
        method, target, _ = start.split(" ")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = int(dict(headers).get("content-length", "0"))
        body = await self._reader.readexactly(length)
        request = Request(method, target, headers, body, time.monotonic())
        if self.fake.control is not None and request.header("user-agent") == "headrace-probe":
            self.fake.probes.append(request)
            await self._tell(self.fake.control(request))
            return await self.request()
        self.fake.requests.append(request)
        self.fake.open_requests += 1
        self._open = True
        return request

    async def _tell(self, told: tuple[int, bytes] | None) -> None:
        if told is None:
            await self.wait_closed()
            raise asyncio.IncompleteReadError(b"", 1)
        await self.answer(told[1], f"{told[0]} Told")

    async def send(self, data: bytes) -> None:
        """These bytes, now, in a segment of their own."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: str = "200 OK", **headers: str) -> None:
        """A response head; names are given with underscores."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        await self.send(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1"))

    async def stream_head(self, content_type: str = "text/event-stream", **headers: str) -> None:
        await self.head(content_type=content_type, transfer_encoding="chunked", **headers)

    async def chunk(self, data: bytes) -> None:
        """One chunk of a chunked body."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def last_chunk(self) -> None:
        await self.send(b"0\r\n\r\n")
        self.finish()

    async def answer(
        self, body: bytes, status: str = "200 OK", content_type: str = "application/json", **headers: str
    ) -> None:
        """A whole answer with its length."""
        await self.head(status, content_type=content_type, content_length=str(len(body)), **headers)
        await self.send(body)
        self.finish()

    def finish(self) -> None:
        """The answer to the request at hand is written: it is no longer open."""
        if self._open:
            self._open = False
            self.served += 1
            self.fake.open_requests -= 1

    def reset(self) -> None:
        """Close with RST."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def fin(self) -> None:
        """Close in order, which ends nothing that was promised a length."""
        self._writer.close()

    async def wait_closed(self, timeout_s: float = 30.0) -> Closed:
        """Until the gateway closes this connection: when, and whether by RST."""
        reset = False
        try:
            async with asyncio.timeout(timeout_s):
                while await self._reader.read(65536):
                    pass
        except ConnectionError:
            reset = True
        closed = Closed(time.monotonic(), reset, self.served)
        self.fake.closed.append(closed)
        return closed


def event(content: str | None = None, *, finish: str | None = None, **delta: object) -> bytes:
    """One chat event as an engine sends it."""
    fields = delta | ({"content": content} if content is not None else {})
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    chunk = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_event(prompt: int = 11, output: int = 7) -> bytes:
    """The chunk that carries nothing but usage."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return (
        b"data: " + json.dumps({"id": "c-1", "choices": [], "usage": usage}, separators=(",", ":")).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


def completion(text: str = "hello", prompt: int = 11, output: int = 7) -> bytes:
    """A whole chat answer."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps(
        {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    ).encode()


def well(request: Request, *models: str) -> tuple[int, bytes] | None:
    """The control of a backend that is ready to serve `models`, or just `m`, and has no metrics."""
    if request.target == "/metrics":
        return 404, b""
    data = [{"id": name, "object": "model"} for name in models or ("m",)]
    return 200, json.dumps({"object": "list", "data": data}).encode()


def gathering(count: int) -> Script:
    """Answers nobody before `count` requests are here at once, whichever fakes play it."""
    arrived = 0
    everybody = asyncio.Event()

    async def script(connection: FakeConnection) -> None:
        nonlocal arrived
        while True:
            await connection.request()
            arrived += 1
            if arrived >= count:
                everybody.set()
            await everybody.wait()
            await connection.answer(completion())

    return script


def streaming(*events: bytes) -> Script:
    """Answers every request with these events, each in a chunk of its own, and nothing else."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.stream_head()
            for each in events:
                await connection.chunk(each)
            await connection.last_chunk()

    return script


async def silent(connection: FakeConnection) -> None:
    """Reads a request and never answers."""
    await connection.request()
    await connection.wait_closed()


async def healthy(connection: FakeConnection) -> None:
    """Serves every request: five tokens where a stream is asked for, a whole answer otherwise."""
    while True:
        request = await connection.request()
        if request.method == "GET":
            await connection.answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
            continue
        asked = request.json() if request.body[:1] == b"{" else {}
        if not asked.get("stream"):
            await connection.answer(completion())
            continue
        await connection.stream_head()
        for number in range(5):
            await connection.chunk(event(f"t{number} "))
        await connection.chunk(event(finish="stop"))
        if (asked.get("stream_options") or {}).get("include_usage"):
            await connection.chunk(usage_event(output=5))
        await connection.chunk(DONE)
        await connection.last_chunk()
