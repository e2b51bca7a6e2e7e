"""The origin server of the benches: an OpenAI-shaped backend as cheap as Python allows.

A proxy is measured by what it costs *beside* its backend, so the backend must cost little and behave: connections
are kept alive and answers are constant bytes. It stands for a pool of ENGINES engines whose steps are spread over the
interval; a step sends one token to each of the engine's streams in one sweep. A message of one word says what is
wanted, since not every proxy keeps other fields:

    (none), not streamed   an answer with 64, 256 or 1,024 bytes of content, in turn
    (none), streamed       a whole short stream at once: role, two tokens, usage if asked, [DONE]
    steady                 the first token now, then one each step while the steps are on; never ends by itself
    flood                  tokens as fast as the reader takes them, for ever

The steps are turned on and off, and all streams ended, by GET /steps/on, off and end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import cast

import uvloop

MODEL = "bench"
CONTENT_BYTES = (64, 256, 1024)
# Engines in the pool that the origin stands for: 500 streams are 50 on each, and a burst of 50 every 2 ms.
ENGINES = 10
# One write of the flood: large enough that the origin is never what limits it.
FLOOD_ROUNDS = 16
# Not one word for ever: LiteLLM ends a stream that says the same a hundred times.
WORDS = (" search", " herit", " point", " respect")
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
KIND = re.compile(rb'"content": ?"(steady|flood)"')
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
USAGE = {"prompt_tokens": 64, "total_tokens": 65, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
# What routers ask of a backend before they use it.
ABOUT = {
    "object": "list",
    "data": [
        {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "max_model_len": 131072}
    ],
    "model_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "version": "0.32.0",
}


def framed(body: bytes) -> bytes:
    """`body` as one chunk of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(delta: dict[str, object], finish: str | None = None) -> bytes:
    """One event of a chat stream in vLLM's shape."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
    chunk = {"id": "chatcmpl-8f090a9c32930f78", "object": "chat.completion.chunk", "created": 1796035165}
    return b"data: %b\n\n" % json.dumps({**chunk, "model": MODEL, "choices": [choice]}, separators=(",", ":")).encode()


def usage_event() -> bytes:
    chunk = {"id": "chatcmpl-8f090a9c32930f78", "object": "chat.completion.chunk", "created": 1796035165}
    body = {**chunk, "model": MODEL, "choices": [], "usage": USAGE}
    return b"data: %b\n\n" % json.dumps(body, separators=(",", ":")).encode()


def whole(document: object) -> bytes:
    """A complete JSON answer, head and body in one piece."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def answers() -> list[bytes]:
    """The JSON answers, one for each of CONTENT_BYTES."""
    head = {"id": "chatcmpl-8f090a9c32930f78", "object": "chat.completion", "created": 1796035165, "model": MODEL}
    documents = []
    for size in CONTENT_BYTES:
        message = {"role": "assistant", "content": "x" * size}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        documents.append(whole({**head, "choices": [choice], "usage": USAGE}))
    return documents


@dataclass(slots=True)
class Streams:
    """The open `steady` streams of every engine, and all answers, encoded once."""

    engines: list[set[Connection]] = field(default_factory=lambda: [set() for _ in range(ENGINES)])
    stepping: bool = False
    served: int = 0
    answers: list[bytes] = field(default_factory=answers)
    about: bytes = field(default_factory=lambda: whole(ABOUT))
    first: bytes = field(default_factory=lambda: STREAM_HEAD + framed(event({"role": "assistant", "content": ""})))
    tokens: list[bytes] = field(default_factory=lambda: [framed(event({"content": word})) for word in WORDS])
    steps: int = 0
    finish: bytes = field(default_factory=lambda: framed(event({"content": "."}, "stop")))
    usage: bytes = field(default_factory=lambda: framed(usage_event()))
    done: bytes = field(default_factory=lambda: framed(b"data: [DONE]\n\n") + LAST_CHUNK)

    def step(self, engine: set[Connection]) -> None:
        """One token to every stream of the engine; a reader that is behind gets none in this step."""
        self.steps += 1
        token = self.tokens[self.steps % len(self.tokens)]
        for connection in engine:
            if not connection.paused:
                connection.transport.write(token)

    def shortest(self) -> set[Connection]:
        return min(self.engines, key=len)

    def end(self, with_usage: bool) -> bytes:
        return self.finish + (self.usage if with_usage else b"") + self.done

    def control(self, path: bytes) -> bytes:
        """Obey one of the /steps paths; anything else is a question about the backend."""
        if path.startswith(b"/steps/"):
            self.stepping = path == b"/steps/on"
            if path == b"/steps/end":
                for connection in [each for engine in self.engines for each in engine]:
                    connection.end()
        return self.about


class Connection(asyncio.Protocol):
    """One kept connection. Requests are not pipelined: proxies do not, and the load generator does not."""

    transport: asyncio.Transport

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.pending = b""
        self.paused = False
        self.flooding = False
        self.with_usage = False
        self.engine: set[Connection] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self.flooding = False
        self.engine.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.flood()

    def data_received(self, data: bytes) -> None:
        request = self.pending = self.pending + data if self.pending else data
        end = request.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        if declared := CONTENT_LENGTH.search(request, 0, end):
            if len(request) < end + int(declared[1]):
                return
        elif request.startswith(b"POST") and not request.endswith(LAST_CHUNK):
            return
        self.pending = b""
        self.answer(request, end)

    def answer(self, request: bytes, end: int) -> None:
        streams = self.streams
        if not request.startswith(b"POST"):
            self.transport.write(streams.control(request.split(b" ", 2)[1]))
        elif b'"stream":true' not in request and b'"stream": true' not in request:
            streams.served += 1
            self.transport.write(streams.answers[streams.served % len(streams.answers)])
        else:
            self.with_usage = b'"include_usage":true' in request or b'"include_usage": true' in request
            self.transport.write(streams.first + streams.tokens[0])
            match KIND.search(request, end):
                case None:
                    self.transport.write(streams.end(self.with_usage))
                case found if found[1] == b"steady":
                    self.engine = streams.shortest()
                    self.engine.add(self)
                case _:
                    self.flooding = True
                    self.flood()

    def flood(self) -> None:
        """Write until the reader is behind; `resume_writing` goes on from there. One burst a turn: others live too."""
        if self.flooding and not self.paused:
            self.transport.write(b"".join(self.streams.tokens) * FLOOD_ROUNDS)
            asyncio.get_running_loop().call_soon(self.flood)

    def end(self) -> None:
        """Finish a steady stream as an engine would."""
        self.engine.discard(self)
        self.transport.write(self.streams.end(self.with_usage))


async def serve(port: int, interval_s: float) -> None:
    """Serve on loopback until killed. A late step goes out at once and is not made up for."""
    loop = asyncio.get_running_loop()
    streams = Streams()
    await loop.create_server(lambda: Connection(streams), "127.0.0.1", port, backlog=4096)
    due = loop.time()
    for engine in itertools.cycle(streams.engines):
        due = max(loop.time(), due + interval_s / ENGINES)
        await asyncio.sleep(due - loop.time())
        if streams.stepping:
            streams.step(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between two steps of an engine")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.interval))


if __name__ == "__main__":
    main()
