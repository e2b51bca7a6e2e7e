"""The endpoints that do not talk: embeddings, rerank, score, images, speech and transcriptions. No I/O.

Each reads a request into a Task: an Ask for the engine and the Dialect that words its result. Results depend on
nothing but the input, so that a repeated request is answered alike.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import xxhash

from loadtests import asks, prose
from loadtests.asks import Ask, InvalidAsk, Json, Model
from loadtests.dialects.chat import Chat
from loadtests.dialects.shape import DONE, Answer, Dialect, data
from loadtests.speech import Speech, Usage

DIMENSIONS = 64
# Speech: 16 kHz, 16 bits, mono; one token of text is this long. Transcription hears it back at the same rate.
SAMPLES_PER_TOKEN = 1600
SAMPLE_BYTES = 2
RATE = 16000
WAV = b"audio/wav"
AUDIO_BYTES_PER_TOKEN = SAMPLES_PER_TOKEN * SAMPLE_BYTES
MOST_AUDIO_TOKENS = 1500
BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";]+)"?', re.IGNORECASE)
DISPOSITION = re.compile(rb'name="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Task:
    """What the engine is to compute, and how the answer is worded. `stream` is the content type of one that streams."""

    ask: Ask
    dialect: Callable[[Answer], Dialect]
    length: int | None = 1  # tokens of each answer; None to let the speaker decide
    stream: bytes | None = None


class Result:
    """A Dialect with one thing to say, at the end."""

    def __init__(self, make: Callable[[Usage], Json | bytes]) -> None:
        self.whole = make

    def begin(self, usage: Usage) -> bytes:
        return b""

    def first(self, choice: int) -> bytes:
        return b""

    def token(self, choice: int, k: int) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, message: str, kind: str, status: int) -> bytes:
        return data({"error": {"message": message, "type": kind, "param": None, "code": status}})


def task(ask: Ask, make: Callable[[Answer, Usage], Json | bytes]) -> Task:
    return Task(ask, lambda answer: Result(lambda usage: make(answer, usage)))


def embeddings(raw: Json, model: Model) -> Task:
    name = model.check(asks.required(raw, "model"))
    prompts = asks.prompts(raw)
    size = asks.whole(raw, "dimensions", 1) or DIMENSIONS
    packed = raw.get("encoding_format") == "base64"

    def make(answer: Answer, usage: Usage) -> Json:
        vectors = [vector(prompt, size) for prompt in prompts]
        values = [base64.b64encode(struct.pack(f"<{size}f", *each)).decode() if packed else each for each in vectors]
        rows = [{"index": i, "object": "embedding", "embedding": value} for i, value in enumerate(values)]
        head = {"id": f"embd-{answer.number}", "object": "list", "created": answer.created, "model": name}
        return {**head, "data": rows, "usage": {**usage.chat(), "total_tokens": usage.prompt, "completion_tokens": 0}}

    return task(sized(Ask(name, prompts, salt=raw.get("cache_salt")), model), make)


def vector(prompt: bytes, size: int) -> list[float]:
    """A unit vector that depends on the text."""
    rng = Random(xxhash.xxh3_64_intdigest(prompt))
    values = [rng.gauss(0, 1) for _ in range(size)]
    norm = sum(value * value for value in values) ** 0.5
    return [value / norm for value in values]


def similarity(a: bytes, b: bytes) -> float:
    """In (0, 1): more for texts that have more tokens in common."""
    one, other = set(prose.token_ids(a)), set(prose.token_ids(b))
    return (1 + len(one & other)) / (2 + len(one | other))


def sized(ask: Ask, model: Model) -> Ask:
    """The ask, if there is something in it and the model can take it."""
    if not ask.prompts:
        raise InvalidAsk("There is nothing to compute.", param="input")
    longest = max(map(prose.token_count, ask.prompts))
    if longest >= model.max_len:
        text = (
            f"This model's maximum context length is {model.max_len} tokens. However, your input has {longest} tokens."
        )
        raise InvalidAsk(text, param="input_tokens")
    return ask


def rerank(raw: Json, model: Model) -> Task:
    name = model.check(raw.get("model", model.names[0]))
    query = asks.text(asks.required(raw, "query"), "query")
    documents = asks.required(raw, "documents")
    texts = [document["text"] if isinstance(document, dict) else document for document in documents]
    rendered = [asks.text(text, "documents") for text in texts]
    most = asks.whole(raw, "top_n") or len(texts)

    def make(answer: Answer, usage: Usage) -> Json:
        scored = [
            {
                "index": i,
                "document": {"text": text, "multi_modal": None},
                "relevance_score": similarity(query, document),
            }
            for i, (text, document) in enumerate(zip(texts, rendered, strict=True))
        ]
        scored.sort(key=lambda row: -row["relevance_score"])  # type: ignore[operator]
        counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return {"id": f"rerank-{answer.number}", "model": name, "usage": counted, "results": scored[:most]}

    return task(sized(Ask(name, [query + document for document in rendered] or [query]), model), make)


def score(raw: Json, model: Model) -> Task:
    name = model.check(raw.get("model", model.names[0]))
    left = raw.get("text_1", raw.get("queries", raw.get("data_1")))
    right = raw.get("text_2", raw.get("documents", raw.get("data_2")))
    if left is None or right is None:
        raise asks.invalid("text_1", "missing", "Field required")
    one = [asks.text(text, "text_1") for text in (left if isinstance(left, list) else [left])]
    other = [asks.text(text, "text_2") for text in (right if isinstance(right, list) else [right])]
    pairs = list(zip(one * len(other) if len(one) == 1 else one, other, strict=False))

    def make(answer: Answer, usage: Usage) -> Json:
        rows = [{"index": i, "object": "score", "score": similarity(a, b)} for i, (a, b) in enumerate(pairs)]
        head = {"id": f"score-{answer.number}", "object": "list", "created": answer.created, "model": name}
        return {**head, "data": rows, "usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}}

    return task(sized(Ask(name, [a + b for a, b in pairs]), model), make)


def images(raw: Json, model: Model) -> Task:
    """One grey pixel per image, of a shade that the prompt decides."""
    name = model.check(raw.get("model", model.names[0]))
    prompt = asks.text(asks.required(raw, "prompt"), "prompt") or b"\0\0\0\0"
    n = asks.choices({**raw, "n": int(raw["n"]) if str(raw.get("n", "")).isdigit() else None})

    def make(answer: Answer, usage: Usage) -> Json:
        shades = [xxhash.xxh3_64_intdigest(prompt, i) & 0xFF for i in range(n)]
        pictures = [{"b64_json": base64.b64encode(png(shade)).decode()} for shade in shades]
        counted = {"input_tokens": usage.prompt, "output_tokens": n, "total_tokens": usage.prompt + n}
        return {"created": answer.created, "data": pictures, "usage": counted}

    return task(sized(Ask(name, [prompt], n=n), model), make)


def png(shade: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes([0, shade]))) + chunk(b"IEND", b"")


class Speaking(Result):
    """A WAV file that is sent as it is made: a tenth of a second for each token of the text."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(lambda usage: {})
        self.samples = answer.speeches[0].length * AUDIO_BYTES_PER_TOKEN

    def first(self, choice: int) -> bytes:
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, RATE * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES)
        body = struct.pack("<4sI", b"data", self.samples)
        return struct.pack("<4sI4s", b"RIFF", 36 + self.samples, b"WAVE") + form + body

    def token(self, choice: int, k: int) -> bytes:
        half = struct.pack("<h", 1000 + 100 * (k % 50))
        return (half * 20 + struct.pack("<h", 0) * 20) * (SAMPLES_PER_TOKEN // 40)


def speech(raw: Json, model: Model) -> Task:
    name = model.check(asks.required(raw, "model"))
    prompt = asks.text(asks.required(raw, "input"), "input")
    ask = sized(Ask(name, [prompt or b"\0\0\0\0"], stream=True), model)
    return Task(ask, Speaking, prose.token_count(ask.prompts[0]), WAV)


class Transcript(Chat):
    """What was heard; in a stream as vLLM sends it, in chunks like those of a chat but without a role."""

    def __init__(self, answer: Answer, seconds: float, form: str) -> None:
        self.seconds, self.form = seconds, form
        super().__init__(answer)

    def chunk_kind(self) -> str:
        return "transcription.chunk"

    def first(self, choice: int) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return DONE

    def whole(self, usage: Usage) -> Json | bytes:
        text = self.answer.speeches[0].text().strip()
        if self.form == "text":
            return text.encode()
        return {"text": text, "usage": {"type": "duration", "seconds": round(self.seconds)}}


def transcription(fields: dict[str, bytes], model: Model) -> Task:
    """From the fields of a form: the file, and as many tokens of text as it is long at the rate of `speech`."""
    name = model.check(fields.get("model", model.names[0].encode()).decode("utf-8", "replace"))
    if "file" not in fields:
        raise asks.invalid("file", "missing", "Field required")
    file = fields["file"]
    tokens = max(1, min(MOST_AUDIO_TOKENS, len(file) // AUDIO_BYTES_PER_TOKEN))
    heard = prose.padded(xxhash.xxh3_128_digest(file) * -(-tokens * prose.TOKEN_BYTES // 16))
    streamed = fields.get("stream", b"").lower() in (b"true", b"1")
    form = fields.get("response_format", b"json").decode("latin-1")
    ask = Ask(name, [heard[: tokens * prose.TOKEN_BYTES]], max_tokens=tokens, ignore_eos=True, stream=streamed)

    def dialect(answer: Answer) -> Dialect:
        return Transcript(answer, len(file) / (RATE * SAMPLE_BYTES), form)

    return Task(ask, dialect, None, b"text/event-stream; charset=utf-8" if streamed else None)


def form(content_type: bytes, body: bytes) -> dict[str, bytes]:
    """The fields of a multipart form by name, files as their bytes."""
    found = BOUNDARY.match(content_type.decode("latin-1"))
    if found is None:
        raise asks.invalid("file", "missing", "Field required")
    fields: dict[str, bytes] = {}
    for part in body.split(b"--" + found[1].encode("latin-1"))[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        if name := DISPOSITION.search(head):
            fields[name[1].decode("utf-8", "replace")] = content.removesuffix(b"\r\n")
    return fields


def spoken(given: Task, tokens: list[str]) -> list[Speech]:
    """The speeches of a task whose length is known."""
    one = Speech(tokens, 0, given.length or 1, "length")
    return [replace(one, start=i) for i in range(len(given.ask.prompts) * given.ask.n)]
