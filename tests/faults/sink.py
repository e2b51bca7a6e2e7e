"""A collector: takes OTLP over HTTP and keeps what came."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import h11
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER, CLIENT, INTERNAL = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL


class Sink:
    """`async with Sink() as sink` listens on `sink.url`. `status` is what it answers; None: nothing, ever."""

    def __init__(self, status: int | None = 200) -> None:
        self.status = status
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.posts = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Sink:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def of_kind(self, kind: Span.SpanKind.ValueType) -> list[Span]:
        """Spans of one kind, by the time that they began."""
        return sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.start_time_unix_nano)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                parser = h11.Connection(h11.SERVER)
                path, body = await self._request(parser, reader)
                self.posts += 1
                if self.status is None:
                    await asyncio.sleep(3600)
                assert path == b"/v1/traces", path
                if self.status == 200:
                    self._take(body)
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % (self.status or 0))
                await writer.drain()
        except (ConnectionError, EOFError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _request(self, parser: h11.Connection, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        path, body = b"", b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(2**16)
                if not data:
                    raise EOFError
                parser.receive_data(data)
            elif isinstance(event, h11.Request):
                path = bytes(event.target)
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return path, body

    def _take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(dict(_pairs(resource.resource.attributes)))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Span) -> dict[str, Any]:
    """As a dictionary."""
    return dict(_pairs(span.attributes))


def seconds(span: Span) -> float:
    """How long it took."""
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _pairs(pairs: Any) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        yield pair.key, _plain(pair.value)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
