"""What the events and answers of the dialects mean, and how each of them says that a stream broke.

One reader serves all dialects: their keys do not collide, and engines mix them (an OpenAI chat stream with an
`event: error`, transcription chunks in the shape of chat chunks).
"""

from __future__ import annotations

import json
import re

import msgspec

from gateway.exchange import Dialect
from gateway.usage import Counts, counts_in, last_counts

DONE = b"[DONE]"
PIECES = frozenset(("content", "reasoning_content", "reasoning", "refusal"))  # of a chat delta
CALLS = frozenset(("tool_calls", "function_call"))
BLOCK_PIECES = ("text", "partial_json", "thinking")  # of an Anthropic content block; a signature is no token
FINAL = frozenset(
    (
        "message_stop",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "transcript.text.done",
        "speech.audio.done",
        "image_generation.completed",
        "image_edit.completed",
    )
)
MAX_CHOICES = 1024  # that are kept track of, a bit for each
WORD_CHARS = 64  # of a finish reason: engines use at most 30, and it ends up in logs

TYPE_FIRST = re.compile(rb'\s*\{\s*"type"\s*:\s*"([^"\\]{1,64})"')
TYPE_LAST = re.compile(rb'"type"\s*:\s*"([^"\\]{1,64})"\s*\}\s*\Z')
ERROR_FIRST = re.compile(rb'\s*\{\s*"error"\s*:\s*[{"]')
FINISH = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"([^"\\]{1,64})"')
STATUS = re.compile(rb'"status"\s*:\s*"(completed|incomplete)"')
INCOMPLETE = re.compile(rb'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"([^"\\]{1,64})"')
NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})')

_decode = msgspec.json.Decoder().decode


class Event(msgspec.Struct, gc=False):
    """What one event, or one whole answer, means to the meter."""

    content: bool = False  # it brings something that the model generated
    text: str = ""  # a string of that content
    finish: str | None = None
    begun: int = 0  # the choices in it, a bit for each
    over: int = 0  # those of them that have a finish reason
    counts: Counts | None = None
    surplus: bool = False  # the chunk that `include_usage` adds: no choices, only usage
    error: bool = False
    done: bool = False  # nothing comes after it
    broken: bool = False  # not a JSON object
    number: int | None = None  # its place in a Responses stream


def read(name: bytes, data: bytes) -> Event:
    """The meaning of an event with this name (may be empty) and this data (not empty)."""
    if data.lstrip().startswith(DONE):
        return Event(done=True)
    body = _parse(data)
    if body is None:
        return Event(broken=True, error=name == b"error")
    event = Event(error=name == b"error" or _is_error(body))
    if usage := body.get("usage"):
        event.counts = counts_in(usage)
    choices = body.get("choices")
    if isinstance(choices, list):
        event.surplus = not choices and event.counts is not None and not event.error
        for choice in choices:
            _read_choice(event, choice)
    else:
        number = body.get("sequence_number")
        event.number = number if isinstance(number, int) else None
        kind = body.get("type") or name.decode("ascii", "replace")
        _read_kind(event, kind if isinstance(kind, str) else "", body)
    return event


def read_answer(data: bytes) -> Event:
    """The meaning of a whole JSON answer that is not a stream."""
    body = _parse(data)
    if body is None:
        return Event(broken=True)
    event = Event(counts=counts_in(body.get("usage")), error=_is_error(body))
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        event.finish = _word(choice, "finish_reason") or event.finish
    event.finish = event.finish or _word(body, "stop_reason") or _outcome(body)
    return event


def glimpse(name: bytes, head: bytes, tail: bytes) -> Event:
    """What can be told of an event of which only the first and the last bytes were kept. `head` starts its data."""
    kind = name.decode("ascii", "replace")
    if not kind and (match := TYPE_FIRST.match(head) or TYPE_LAST.search(tail)):
        kind = match[1].decode("ascii", "replace")
    event = Event(
        content=kind.endswith(".delta") or kind == "content_block_delta" or (not kind and b'"choices"' in head),
        counts=last_counts(tail) or last_counts(head),
        error=kind in ("error", "response.failed") or ERROR_FIRST.match(head) is not None,
        done=kind in FINAL,
    )
    if event.done and kind != "message_stop":
        event.finish = _last_word(INCOMPLETE, head, tail) or kind.rpartition(".")[2]
    elif event.content or kind == "message_delta":
        event.finish = _last_word(FINISH, tail)
    event.over = 0 if event.finish is None else -1  # of whichever choice it is
    if number := _last_word(NUMBER, head, tail):
        event.number = int(number)
    return event


def glimpse_answer(head: bytes, tail: bytes) -> Event:
    """What can be told of a whole answer of which only the first and the last bytes were kept."""
    return Event(
        finish=_last_word(FINISH, tail) or _last_word(INCOMPLETE, head, tail) or _last_word(STATUS, head, tail),
        counts=last_counts(tail) or last_counts(head),
        error=ERROR_FIRST.match(head) is not None,
    )


def error_frame(dialect: Dialect, message: str, kind: str, code: str, sequence_number: int = 0) -> bytes:
    """One whole event that tells the client of `dialect` that its stream broke.

    Written in ASCII: some clients split lines at U+2028. `sequence_number` is that of a Responses event.
    """
    if dialect is Dialect.RESPONSES:
        return b"event: error\n" + _frame(
            {"type": "error", "code": code, "message": message, "param": None, "sequence_number": sequence_number}
        )
    if dialect is Dialect.MESSAGES:
        return b"event: error\n" + _frame({"type": "error", "error": {"type": kind, "message": message}})
    return _frame({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _frame(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _parse(data: bytes) -> dict[str, object] | None:
    """A JSON object; None for anything else. What Python's own parser forgives (NaN, halves of surrogate pairs,
    invalid UTF-8) is forgiven here too, because the client reads on."""
    try:
        body = _decode(data)
    except (ValueError, RecursionError):
        try:
            body = json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return body if isinstance(body, dict) else None


def _is_error(body: dict[str, object]) -> bool:
    return bool(body.get("error")) or "error" in (body.get("type"), body.get("object"))  # vLLM before 0.10: object


def _at(value: object, *path: str) -> object:
    """The member at `path`, or None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _word(value: object, key: str) -> str | None:
    word = _at(value, key)
    if not isinstance(word, str) or not word:
        return None
    return word[:WORD_CHARS].encode("utf-8", "replace").decode()  # half a surrogate pair cannot be passed on


def _last_word(pattern: re.Pattern[bytes], *pieces: bytes) -> str | None:
    words = [word for piece in pieces for word in pattern.findall(piece)]
    return words[-1].decode("ascii", "replace") if words else None


def _outcome(response: object) -> str | None:
    """How a Responses object ended."""
    return _word(_at(response, "incomplete_details"), "reason") or _word(response, "status")


def _read_choice(event: Event, choice: object) -> None:
    if not isinstance(choice, dict):
        return
    index = choice.get("index", 0)
    place = 1 << index if isinstance(index, int) and 0 <= index < MAX_CHOICES else 0
    event.begun |= place
    if choice.get("finish_reason"):
        event.over |= place
        event.finish = _word(choice, "finish_reason") or event.finish
    if text := choice.get("text"):
        _take(event, text)
    delta = choice.get("delta")
    for key, piece in delta.items() if isinstance(delta, dict) else ():
        if piece and key in PIECES:
            _take(event, piece)
        elif piece and key in CALLS:
            event.content = True
            _take(event, _at(piece[-1] if isinstance(piece, list) else {"function": piece}, "function", "arguments"))


def _read_kind(event: Event, kind: str, body: dict[str, object]) -> None:
    """The events that are told apart by their type."""
    if kind.endswith(".delta"):
        _take(event, body.get("delta", True))
    elif kind == "content_block_delta":
        for key in BLOCK_PIECES:
            _take(event, _at(body, "delta", key))
    elif kind == "message_delta":
        event.finish = _word(_at(body, "delta"), "stop_reason")
    elif kind == "message_start":
        counts = counts_in(_at(body, "message", "usage"))  # its output tokens are a beginning, not a count
        event.counts = counts and Counts(counts.prompt, None, counts.cached)
    elif kind in FINAL:
        event.done = True
        event.error = event.error or kind == "response.failed"
        if kind != "message_stop":
            response = body.get("response", body)
            event.finish = _outcome(response) or kind.rpartition(".")[2]
            event.counts = counts_in(_at(response, "usage"))


def _take(event: Event, piece: object) -> None:
    if piece:
        event.content = True
        if isinstance(piece, str):
            event.text = piece
