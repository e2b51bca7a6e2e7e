"""A tap in the line between the gateway and an engine: passes every byte on, and keeps what the engine sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11


@dataclass
class Line:
    """One connection: the requests as they went up, and the answers as they came down."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


@dataclass
class Tap:
    """Listens at `url`. Each connection gets one of its own to the engine."""

    engine: str
    url: str = ""
    lines: list[Line] = field(default_factory=list)

    def answers(self) -> list[bytes]:
        """The bodies of all answers so far, in order, as h11 reads them: without their framing."""
        return [body for line in tuple(self.lines) for body in _bodies(line)]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line()
        self.lines.append(line)
        address = urlsplit(self.engine)
        theirs, to_engine = await asyncio.open_connection(address.hostname, address.port)
        try:
            await asyncio.gather(_pass(reader, to_engine, line.up), _pass(theirs, writer, line.down))
        finally:
            writer.close()
            to_engine.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    """What comes in goes out; so does its end."""
    try:
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


def _bodies(line: Line) -> Iterator[bytes]:
    """h11 needs the requests too: how an answer is framed depends on what was asked."""
    asked, told = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
    asked.receive_data(bytes(line.up))
    told.receive_data(bytes(line.down))
    while isinstance(request := asked.next_event(), h11.Request):
        told.send(request)
        while not isinstance(piece := asked.next_event(), h11.EndOfMessage):
            assert isinstance(piece, h11.Data), piece
            told.send(piece)
        told.send(h11.EndOfMessage())
        body = b""
        while not isinstance(event := told.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.Response):
                return  # still under way, or broken off
        yield body
        if h11.MUST_CLOSE in (asked.our_state, told.our_state, told.their_state):
            return
        asked.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        asked.send(h11.EndOfMessage())
        asked.start_next_cycle()
        told.start_next_cycle()


@contextmanager
def tapped(engine: str) -> Iterator[Tap]:
    """A tap before the engine, in a thread with a loop of its own."""
    tap, loop = Tap(engine), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(tap.connected, "127.0.0.1", 0))
    tap.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield tap
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
