"""A running emulator, and a client that sees every byte of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loadtests.emulator import Emulator, Server, Settings

LONG = "The headrace brings the water to the turbines. " * 40


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    yield Emulator(Settings(aliases=("gpt-4o", "org/name"), speed=20))


@pytest.fixture
async def server(emulator: Emulator) -> AsyncIterator[Server]:
    async with emulator.serve() as server:
        yield server


class RawClient:
    """One connection. Reads and writes exactly what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: Server) -> RawClient:
        return cls(*await asyncio.open_connection(server.host, server.port))

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def send(self, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> None:
        """Send one request; a body that is no bytes goes as JSON."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: emulator", f"content-length: {len(raw)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.strip().split("\r\n")
        return int(first.split()[1]), {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }

    async def body(self, headers: dict[str, str]) -> bytes:
        """The body that the headers announce. Raises IncompleteReadError if it is cut short."""
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return b"".join(parts)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        return status, headers, await self.body(headers)

    async def rest(self) -> bytes:
        """All that comes until the other side ends the connection. Raises ConnectionError after a reset."""
        return await self.reader.read()


async def ask(server: Server, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> tuple[int, Any]:
    """One request on a connection of its own: status, and the JSON that was answered (or the bytes, if it is none)."""
    async with await RawClient.open(server) as client:
        client.send(path, body, method=method, **headers)
        status, _, raw = await client.answer()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw


def chat(text: str = "How does the water reach the turbine?", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def events(raw: bytes) -> list[Any]:
    """The data of every event, parsed; [DONE] as a string."""
    data = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]
