"""An emulated backend: the engine model behind an OpenAI and Anthropic API, with vLLM's metrics, errors and habits.

    async with Emulator(Settings(model="m")).serve() as server:
        ...  server.url

It answers in real time, at `speed` times the pace of the named model and GPU. It fails when it is told to, by
`Settings.faults` or by a header of the request; see `loadtests.faults`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from loadtests import asks, faults, oneshot, prose
from loadtests.asks import Ask, InvalidAsk, Json, Model
from loadtests.dialects.chat import Chat, Completion
from loadtests.dialects.messages import Messages
from loadtests.dialects.responses import Responses
from loadtests.dialects.shape import Answer, Dialect, encoded
from loadtests.engine import Engine
from loadtests.faults import Told
from loadtests.gauges import Gauges
from loadtests.generation import Generation
from loadtests.httpd import Connection, Reply, Request
from loadtests.live import LiveEngine
from loadtests.oneshot import Task
from loadtests.profiles import PROFILES
from loadtests.speech import Speaker

EVENTS = b"text/event-stream; charset=utf-8"
METRICS = b"text/plain; version=0.0.4; charset=utf-8"
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """What is emulated. `engine` is a name of PROFILES; `kv_tokens` None is what its GPUs hold; times in seconds."""

    model: str = "m"
    aliases: tuple[str, ...] = ()
    engine: str = "llama-3-8b-h100"
    speed: float = 1.0
    faults: tuple[Told, ...] = ()
    seed: int = 0
    chunk: int = 8192  # vLLM's defaults for a server on an H100, as is max_seqs
    max_seqs: int = 1024
    kv_tokens: int | None = None
    max_model_len: int = 131_072
    mean_output_tokens: float = 128.0
    keep_alive_s: float = 5.0  # uvicorn's, and so vLLM's


@dataclass(frozen=True, slots=True)
class Server:
    """Where the emulator listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Statistics:
    running: int
    waiting: int
    connections: int


Read = TypeVar("Read")
Generating = tuple[Callable[[Json, Model], Ask], Callable[[Answer], Dialect]]
GENERATING: dict[str, Generating] = {
    "/v1/chat/completions": (asks.chat, Chat),
    "/v1/completions": (asks.completion, Completion),
    "/v1/responses": (asks.response, Responses),
    "/v1/messages": (asks.message, Messages),
}
ONE_SHOT: dict[str, Callable[[Json, Model], Task]] = {
    "/v1/embeddings": oneshot.embeddings,
    "/v1/rerank": oneshot.rerank,
    "/v2/rerank": oneshot.rerank,
    "/rerank": oneshot.rerank,
    "/v1/score": oneshot.score,
    "/score": oneshot.score,
    "/v1/images/generations": oneshot.images,
    "/v1/audio/speech": oneshot.speech,
}
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits")
PLACES = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


class Emulator:
    """One backend. `wall` counts Unix seconds, `clock` seconds of any origin."""

    def __init__(
        self,
        settings: Settings,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        profile = PROFILES.get(settings.engine)
        if profile is None:
            raise ValueError(f"no engine {settings.engine!r}; there are {', '.join(PROFILES)}")
        self.settings, self.wall = settings, wall
        self.engine = Engine(
            profile, chunk=settings.chunk, kv_tokens=settings.kv_tokens or 0, max_seqs=settings.max_seqs
        )
        most = min(settings.max_model_len, (self.engine.pool.total - 1) * prose.BLOCK_TOKENS)
        self.model = Model((settings.model, *settings.aliases), most)
        self.speaker = Speaker(prose.Corpus(settings.seed), settings.seed, settings.mean_output_tokens, most)
        self.gauges = Gauges(settings.model)
        self.live = LiveEngine(self.engine, self.gauges, settings.speed, clock)
        self.rng = Random(settings.seed)
        self.connections: set[Connection] = set()

    def __repr__(self) -> str:
        return f"<Emulator {self.settings.model} [{len(self.connections)} connections] {self.live!r}>"

    def statistics(self) -> Statistics:
        return Statistics(self.engine.running, self.engine.waiting, len(self.connections))

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Server]:
        """Listen (on a free port if 0) until the block ends; then every connection is dropped."""
        if any(told.name == "refuse" for told in self.settings.faults):
            with socket.socket() as closed:  # bound, so that nobody else listens there, but not listening
                closed.bind((host, port))
                yield Server(host, closed.getsockname()[1])
            return
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self.connection, host, port, backlog=BACKLOG)

        def stop(_: object = None) -> None:
            server.close()
            for connection in list(self.connections):
                connection.transport.abort()

        running = asyncio.create_task(self.live.run())
        running.add_done_callback(stop)  # a fault of ours must not pass for a backend that stalls
        try:
            yield Server(host, server.sockets[0].getsockname()[1])
        finally:
            stop()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    def connection(self) -> Connection:
        return Connection(self.handle, self.settings.keep_alive_s, self.connections)

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request, or let a fault do it."""
        try:
            told = faults.told(request)
            armed = self.settings.faults if told is None else (*self.settings.faults, told)
            if not any(fault.strike(reply, self.rng) for fault in armed):
                self.route(request, reply)
        except InvalidAsk as error:
            refuse(reply, error, request.path)
        except ValueError as error:
            refuse(reply, InvalidAsk(str(error)), request.path)

    def route(self, request: Request, reply: Reply) -> None:
        path, method = request.path, request.method
        known = path in GENERATING or path in ONE_SHOT or path in FORMS or path in PLACES
        if known and method != "POST":
            reply.whole(405, b'{"detail":"Method Not Allowed"}', headers=[(b"allow", b"POST")])
        elif path in GENERATING:
            reader, dialect = GENERATING[path]
            ask = self.read(reader, asks.document(request.body))
            self.generate(Task(ask, dialect, None, EVENTS if ask.stream else None), reply)
        elif path in ONE_SHOT:
            self.generate(self.read(ONE_SHOT[path], asks.document(request.body)), reply)
        elif path in FORMS:
            fields = oneshot.form(request.headers.get(b"content-type", b""), request.body)
            self.generate(self.form_task(path, fields), reply)
        elif path in PLACES:
            reply.whole(200, encoded(self.count(path, asks.document(request.body))))
        else:
            self.tell(path, reply)

    def read(self, reader: Callable[[Json, Model], Read], raw: Json) -> Read:
        """What the reader makes of a document; a shape that none of its checks foresaw is the client's mistake too."""
        try:
            return reader(raw, self.model)
        except (AttributeError, KeyError, TypeError) as exc:
            raise asks.invalid("", "value_error", str(exc)) from exc

    def form_task(self, path: str, fields: dict[str, bytes]) -> Task:
        if path != "/v1/images/edits":
            return oneshot.transcription(fields, self.model)
        return oneshot.images({name: value.decode("utf-8", "replace") for name, value in fields.items()}, self.model)

    def generate(self, task: Task, reply: Reply) -> None:
        ask = task.ask
        if task.length is not None:
            speeches = oneshot.spoken(task, self.speaker.corpus.tokens)
        else:
            speeches = [self.speaker.answer(ask, prompt, i) for prompt in ask.prompts for i in range(ask.n)]
        answer = Answer(os.urandom(8).hex(), int(self.wall()), ask, speeches)
        Generation(answer, task.dialect(answer), reply, self.live, stream=task.stream).start()

    def count(self, path: str, raw: Json) -> Json:
        """The endpoints about tokens; they do not concern the engine."""
        if path == "/detokenize":
            return {"prompt": asks.detokenized(raw)}
        self.model.check(raw.get("model", self.model.names[0]))
        if path == "/v1/messages/count_tokens":
            return {"input_tokens": prose.token_count(asks.rendered_message(raw))}
        chat = "messages" in raw
        rendered = asks.conversation(raw["messages"], raw.get("tools"), "messages") if chat else asks.prompts(raw)[0]
        ids = prose.token_ids(rendered)
        return {"count": len(ids), "max_model_len": self.model.max_len, "tokens": ids, "token_strs": None}

    def tell(self, path: str, reply: Reply) -> None:
        """The endpoints that tell about the server."""
        name = path.removeprefix("/v1/models/")
        match path:
            case "/health" | "/ping":
                reply.whole(200, b"")
            case "/metrics":
                reply.whole(200, self.gauges.text(self.engine).encode(), METRICS)
            case "/version":
                reply.whole(200, b'{"version":"0.32.0"}')
            case "/load":
                reply.whole(200, b'{"server_load":%d}' % (self.engine.running + self.engine.waiting))
            case "/v1/models":
                cards = [self.card(each) for each in self.model.names]
                reply.whole(200, encoded({"object": "list", "data": cards}))
            case _ if name != path:
                reply.whole(200, encoded(self.card(self.model.check(name))))
            case _:
                reply.whole(404, b'{"detail":"Not Found"}')

    def card(self, name: str) -> Json:
        about = {"object": "model", "created": int(self.wall()), "owned_by": "vllm", "root": self.settings.model}
        return {"id": name, **about, "parent": None, "max_model_len": self.model.max_len}


def refuse(reply: Reply, error: InvalidAsk, path: str) -> None:
    """An error in the shape that the path speaks."""
    if path.startswith("/v1/messages"):
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        reply.whole(error.status, encoded({"type": "error", "error": {"type": kind, "message": error.message}}))
        return
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    reply.whole(error.status, encoded({"error": body}))
