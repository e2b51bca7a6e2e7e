"""What all dialects share: who answers, and how JSON goes onto the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from loadtests.asks import Ask, Json
from loadtests.speech import Speech, Usage

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-0.32.0-62b0af32"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request being answered: `number` makes its ids unique; `created` in Unix seconds."""

    number: str
    created: int
    ask: Ask
    speeches: Sequence[Speech]


class Dialect(Protocol):
    """Words one answer. The stream is `begin`, then for each choice `first` and its tokens, then `end`."""

    def begin(self, usage: Usage) -> bytes:
        """Sent with the first token of all; the prompt's share of the usage is known."""

    def first(self, choice: int) -> bytes:
        """Sent before the first token of a choice."""

    def token(self, choice: int, k: int) -> bytes:
        """The k-th token of a choice; its last one says how it finished."""

    def end(self, usage: Usage) -> bytes:
        """Sent after the last token of all."""

    def whole(self, usage: Usage) -> Json | bytes:
        """The answer to a request that is not streamed; bytes are plain text."""

    def error(self, message: str, kind: str, status: int) -> bytes:
        """An error in mid-stream, and what follows it."""


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


def escaped(text: str) -> bytes:
    """`text` as it stands between the quotes of a JSON string."""
    return encoded(text)[1:-1]


def parsed(text: str) -> object:
    """The document, or None of one that was cut short."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def data(value: object) -> bytes:
    """An event of the kind that has no name."""
    return b"data: %b\n\n" % encoded(value)


def named(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encoded(value))
