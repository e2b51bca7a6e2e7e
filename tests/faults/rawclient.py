"""A client of exact bytes: sends what a test says, and notes when what came back."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass
class Response:
    """One response. `pieces` are the body's pieces with the time each came in; `raw` is all of its bytes."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    head_at: float = 0.0
    ended_at: float = 0.0
    complete: bool = False
    interim: list[int] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def header(self, name: str) -> str | None:
        """The one value of a header; None if it is absent."""
        values = self.all(name)
        assert len(values) < 2, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The OpenAI error object; fails if it is not one."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and isinstance(error["type"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return error  # type: ignore[no-any-return]


def post(body: bytes | dict[str, Any], path: str = "/v1/chat/completions", *lines: str) -> bytes:
    """The bytes of a POST. `lines` are further header lines; a Content-Length is added unless one is among them."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    head = [f"POST {path} HTTP/1.1", "Host: gateway", *lines]
    names = {line.split(":")[0].lower() for line in lines}
    if "content-type" not in names:
        head.append("Content-Type: application/json")
    if not names & {"content-length", "transfer-encoding"}:
        head.append(f"Content-Length: {len(data)}")
    return ("\r\n".join(head) + "\r\n\r\n").encode() + data


def chat(*lines: str, path: str = "/v1/chat/completions", **fields: Any) -> bytes:
    """The bytes of a chat request for model `m`."""
    return post({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields, path, *lines)


class RawClient:
    """One connection to the gateway. `async with RawClient(port) as client`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._address = (host, port)
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**26)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> RawClient:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=2**26)
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._writer is not None
        self._writer.transport.abort()

    @property
    def port(self) -> int:
        """Its own."""
        assert self._writer is not None
        return int(self._writer.get_extra_info("sockname")[1])

    async def send(self, data: bytes) -> None:
        """These bytes, now."""
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def ask(self, data: bytes, timeout_s: float = 20.0) -> Response:
        """Send a request and read its whole response."""
        await self.send(data)
        return await self.response(timeout_s, method="HEAD" if data.startswith(b"HEAD ") else "GET")

    async def response(self, timeout_s: float = 20.0, *, until: bytes | None = None, method: str = "GET") -> Response:
        """The next response on this connection, read to its end or until `until` stands in the body. h11 judges the
        framing. `complete` is False where the connection broke first."""
        response = Response()
        await self.read(response, timeout_s, until=until, method=method)
        return response

    async def read(
        self, response: Response, timeout_s: float = 20.0, *, until: bytes | None = None, method: str = "GET"
    ) -> None:
        """Read more of a response: to its end, or until `until` stands in the body."""
        assert self._reader is not None
        if self._parser.our_state is h11.DONE and self._parser.their_state is h11.DONE:
            self._parser.start_next_cycle()
        if self._parser.our_state is h11.IDLE:
            self._parser.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
            self._parser.send(h11.EndOfMessage())
        async with asyncio.timeout(timeout_s):
            while not response.complete and (until is None or until not in response.body):
                try:
                    event = self._parser.next_event()
                    if event is h11.NEED_DATA:
                        self._parser.receive_data(await self._reader.read(65536))
                    else:
                        self._note(response, event)
                except (ConnectionError, h11.RemoteProtocolError):
                    return

    def _note(self, response: Response, event: Any) -> None:
        now = time.monotonic()
        if isinstance(event, h11.InformationalResponse):
            response.interim.append(event.status_code)
        elif isinstance(event, h11.Response):
            response.status, response.head_at = event.status_code, now
            response.headers = [(name.decode(), value.decode("latin-1")) for name, value in event.headers]
        elif isinstance(event, h11.Data):
            response.pieces.append((now, bytes(event.data)))
        elif isinstance(event, h11.EndOfMessage):
            response.complete, response.ended_at = True, now
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("closed")

    async def interim(self, timeout_s: float = 20.0) -> bytes:
        """The head of an interim response; what comes behind it is the next response."""
        assert self._reader is not None
        async with asyncio.timeout(timeout_s):
            return await self._reader.readuntil(b"\r\n\r\n")

    def half_close(self) -> None:
        """No more will be sent; reading goes on."""
        assert self._writer is not None
        self._writer.write_eof()

    def close(self) -> None:
        """Leave with FIN."""
        assert self._writer is not None
        self._writer.close()

    def reset(self) -> None:
        """Leave with RST."""
        assert self._writer is not None
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def closed(self, timeout_s: float = 10.0) -> bool:
        """Whether the gateway closes the connection in time, after what it still sends."""
        assert self._reader is not None
        try:
            async with asyncio.timeout(timeout_s):
                while await self._reader.read(65536):
                    pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


async def ask(port: int, data: bytes, timeout_s: float = 20.0) -> Response:
    """One request on a connection of its own."""
    async with RawClient(port) as client:
        return await client.ask(data, timeout_s)
