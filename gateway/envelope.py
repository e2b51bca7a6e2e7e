"""A JSON object seen from outside: its top-level members as they stand in the bytes, and edits that touch nothing else.

Values are never decoded and written again. An edit is a splice: the bytes around it are the client's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

Piece = bytes | memoryview

MAX_MEMBERS = 1024  # requests have up to some 60; each costs time on the event loop
MAX_SURROGATES = 64 * 1024  # replacing that many takes some 70 ms

# Neither ever backtracks: a key may have megabytes.
KEY = re.compile(rb'[ \t\n\r]*+("[^"\\]*+(?:\\.[^"\\]*+)*")[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL)
SEPARATOR = re.compile(rb"[ \t\n\r]*+([,}])")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode


class BadBody(Exception):
    """The body is not one JSON object with distinct keys. The message says why and where."""


class Member(NamedTuple):
    """Offsets of one `"key": value` in the body."""

    key: int
    value: int
    end: int


@dataclass(slots=True)
class Envelope:
    """`members` maps each top-level key to the bytes of its value, in the order sent."""

    body: bytes
    members: Mapping[str, msgspec.Raw]

    def spans(self) -> dict[str, Member]:
        """Where each member stands. Raises BadBody for a key given twice."""
        body, position, separator = self.body, self.body.index(b"{") + 1, b","
        spans: dict[str, Member] = {}
        for name, raw in self.members.items():
            key = KEY.match(body, position)
            if key is None or separator != b"," or _key(key[1]) != name:
                raise _repeated(name)
            end = key.end() + len(raw)
            after = SEPARATOR.match(body, end)
            if after is None:
                raise _repeated(name)
            spans[name] = Member(key.start(1), key.end(), end)
            position, separator = after.end(), after[1]
        if separator == b"," and spans:
            raise _repeated("one")
        return spans

    def splice(self, values: Mapping[str, bytes], removals: Iterable[str] = ()) -> list[Piece]:
        """The body with the values of some members replaced (or the members added in front) and others removed."""
        spans = self.spans()
        removed = frozenset(removals) & spans.keys()
        edits = [(spans[name].value, spans[name].end, value) for name, value in values.items() if name in spans]
        edits += _deletions(spans, removed)
        added = [b'"%b":%b' % (name.encode(), value) for name, value in values.items() if name not in spans]
        if added:
            if len(removed) < len(spans):
                added.append(b"")
            start = self.body.index(b"{") + 1
            edits.append((start, start, b",".join(added)))
        return patched(self.body, sorted(edits))


def read(body: bytes) -> Envelope:
    """Raises BadBody unless `body` is one JSON object in UTF-8 whose top-level keys are distinct."""
    try:
        members = _members(body)
        if not body.isascii():
            body.decode()
    except msgspec.ValidationError as error:
        raise BadBody(f"The body must be a JSON object. {error}.") from None
    except msgspec.DecodeError as error:
        raise BadBody(f"The body is not valid JSON. {error}.") from None
    except RecursionError:
        raise BadBody("The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise BadBody(f"The body is not valid UTF-8 (byte {error.start}).") from None
    if len(members) > MAX_MEMBERS:
        raise BadBody(f"The body has more than {MAX_MEMBERS} keys.")
    envelope = Envelope(body, members)
    if not _is_compact(body, members):
        envelope.spans()
    return envelope


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _decode_members(body)
    except msgspec.DecodeError as error:
        # Lone surrogates are legal JSON (RFC 8259, 8.2) and arrive in practice; msgspec refuses them even in what it
        # skips. With stand-ins of the same length the structure can be read, and the offsets hold.
        masked = SURROGATE.sub(rb"\\ufffd", body, MAX_SURROGATES)
        if masked == body:
            raise error from None
        return _decode_members(masked)


def _is_compact(body: bytes, members: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the body is as long as its members without white space: then no key can stand twice."""
    length = 1 if members else 2
    for name, raw in members.items():
        length += len(name) + len(raw) + 4
    return length == len(body) and body.isascii()


def _key(literal: bytes) -> str:
    try:
        return _decode_key(literal)
    except msgspec.DecodeError:
        return _decode_key(SURROGATE.sub(rb"\\ufffd", literal))


def _repeated(name: str) -> BadBody:
    return BadBody(f"The body gives a key twice, at or after {name[:80]!r}.")


def _deletions(spans: Mapping[str, Member], removed: frozenset[str]) -> Iterable[tuple[int, int, bytes]]:
    """Each removed member goes with the comma behind it; a removed tail goes with the comma before it."""
    if not removed:
        return
    order = list(spans)
    kept_end = max((spans[name].end for name in order if name not in removed), default=None)
    for name, following in zip(order, [*order[1:], None], strict=True):
        if name not in removed:
            continue
        if following is not None and (kept_end is None or spans[name].key < kept_end):
            yield spans[name].key, spans[following].key, b""
        elif kept_end is not None:
            yield kept_end, spans[name].end, b""
            kept_end = spans[name].end
        else:
            yield spans[name].key, spans[name].end, b""


def patched(body: bytes, edits: Iterable[tuple[int, int, bytes]]) -> list[Piece]:
    """The body in pieces, with what stands between two offsets replaced; edits in order, none over another."""
    view = memoryview(body)
    pieces: list[Piece] = []
    position = 0
    for start, end, replacement in edits:
        pieces += [view[position:start], replacement]
        position = end
    pieces.append(view[position:])
    return [piece for piece in pieces if len(piece)]
