"""The meter: the events of a stream pass through it on their way to the client and leave their measures behind.

Events go out whole, as soon as they are whole, and unchanged. A stream is made of many events that differ in one
string, the next piece of text. So the meter parses one of them and keeps what stands before and after that string. As
long as events begin and end in the same way nothing else can be in them, and three comparisons stand for a parser.
Any other event is parsed, and if it brings content only it becomes the new pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

import msgspec

from gateway.dialects import Event, glimpse, read
from gateway.exchange import Dialect, Tally
from gateway.frames import HOLD_BYTES, Excerpt, event_end, fields, skip_line_ends
from gateway.reading import Reading

PATTERN_BYTES = 4 * 1024  # a longer event makes no pattern: every open stream would keep that much
SNIFF_BYTES = 16 * 1024  # an answer that long without one whole event is no error

NOTHING = Event()
Pattern = tuple[bytes, bytes, int | None]  # what stands before and after the text; the number of a Responses event
NO_PATTERN: Pattern = (b"\0", b" ", None)  # nothing fits: no string ends at a space
NUMBER = b'"sequence_number":%d'
# The inside of a JSON string that is not empty, up to its closing quote. It never backtracks: nothing follows.
STRING = re.compile(rb'(?!")[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*')

_string = STRING.match
_encode = msgspec.json.Encoder().encode


class Sniff(Enum):
    """What the first event of a stream is."""

    PENDING = "pending"  # not here yet
    FINE = "fine"
    ERROR = "error"


def first_event(data: bytes) -> tuple[bytes, bytes] | None:
    """The name and the data of the first event of a stream; None while it is not whole."""
    start = skip_line_ends(data, 0)
    end = event_end(data, start)
    return None if end < 0 else fields(data[start:end])


def sniff(data: bytes) -> Sniff:
    """Whether a stream that begins with `data` begins with an error: an engine that died answers 200, then says so."""
    first = first_event(data)
    if first is None:
        return Sniff.FINE if len(data) > SNIFF_BYTES else Sniff.PENDING
    name, payload = first
    return Sniff.ERROR if payload and read(name, payload).error else Sniff.FINE


class Meter(Reading):
    """Sees the bytes of an event stream, cut anywhere."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        strip_usage: bool = False,
        on_first_token: Callable[[float], None] | None = None,
        tally: Tally | None = None,
    ) -> None:
        """`strip_usage` takes the usage-only chunk out again: the client did not ask for it."""
        super().__init__(dialect, on_first_token, tally)
        self._strip_usage = strip_usage
        self._pattern = NO_PATTERN
        self._open: bytearray | Excerpt | None = None  # an unfinished event: held back, or too long and passing by
        self._torn = False  # what went out at the end was no whole event
        self.last_sequence_number: int | None = None  # of a Responses stream

    def feed(self, data: bytes, now: float) -> bytes:
        """Bytes of the stream that came in at `now`; returns those that may go out."""
        self.bytes_in += len(data)
        if self._open is not None:
            return self._resume(data, now)
        before, after, number = self._pattern
        size = len(data)
        position = events = 0
        while position < size and data.startswith(before, position):
            string = _string(data, position + len(before))
            if string is None or not data.startswith(after, string.end()):
                break
            position = string.end() + len(after)
            events += 1
            if number is not None:
                self.last_sequence_number = number
                before, after, number = self._expect_next(number)
        self.events += events
        self.tokens += events
        if position < size:
            return self._pass(data, position, events, now)
        self.last_data_at = now
        if events:
            self._came(events, now)
        return data

    def end(self, now: float) -> bytes:
        """The upstream ended its answer. Returns what was held back, an event without its blank line; but not the
        beginning of one: where the answer is not complete it is dropped, as at a break."""
        rest, self._open, self._ended = self._open, None, True
        if rest is None:
            return b""
        event = self._read(rest, now) if isinstance(rest, Excerpt) else self._read(bytes(rest), now)
        if event.content:
            self._came(1, now)
        dropped = (event.surplus and self._strip_usage) or (event.broken and not self.complete)
        if dropped and isinstance(rest, bytearray):
            return b""
        self._torn = True
        return bytes(rest) if isinstance(rest, bytearray) else b""

    def broken(self) -> bytes:
        """No more will come, or what came will not do. Returns what has to go out before an error frame, so that the
        frame stands on an event boundary. An unfinished event that was held back is dropped."""
        torn = self._torn or isinstance(self._open, Excerpt)
        self._open, self._torn = None, False
        return b"\n\n" if torn else b""

    def _resume(self, data: bytes, now: float) -> bytes:
        """Bytes that begin inside an event."""
        rest = self._open
        if isinstance(rest, bytearray):
            seam = max(0, len(rest) - 3)  # a blank line has at most four bytes
            rest += data
            if len(rest) <= HOLD_BYTES and event_end(rest, seam) < 0:
                if self.finish is None:
                    self.last_data_at = now
                return b""
            self._open = None
            self.bytes_in -= len(rest)  # they were counted when they came
            return self.feed(bytes(rest), now)
        assert rest is not None
        end = event_end(rest.last(3) + data) - 3
        if end < 0:
            rest.add(data)
            self.last_data_at = now
            return data
        rest.add(data[:end])
        self._open = None
        return self._pass(data, end, int(self._read(rest, now).content), now)

    def _pass(self, data: bytes, start: int, came: int, now: float) -> bytes:
        """Any events, from `start` on; the `came` content events before it are counted, but not their gaps."""
        if came or self.finish is None:
            self.last_data_at = now
        kept: list[bytes] = []
        kept_from = 0
        start = skip_line_ends(data, start)
        while (end := event_end(data, start)) >= 0:
            event = self._read(data[start:end], now)
            came += event.content
            if event.surplus and self._strip_usage:
                kept.append(data[kept_from:start])
                kept_from = end
            start = skip_line_ends(data, end)
        if came:
            self._came(came, now)
        end = self._hold(data, start)
        out = data[kept_from:end]  # the same object where that is all of it
        return b"".join((*kept, out)) if kept else out

    def _hold(self, data: bytes, start: int) -> int:
        """Keeps the unfinished event at `start`, if there is one. Returns the index up to which `data` goes out."""
        size = len(data) - start
        if size == 0:
            return start
        if size > HOLD_BYTES:
            self._open = Excerpt(data[start:])
            return len(data)
        self._open = bytearray(data[start:])
        return start

    def _read(self, raw: bytes | Excerpt, now: float) -> Event:
        """One event, or what was kept of it."""
        if isinstance(raw, bytes) and len(raw) > HOLD_BYTES:
            raw = Excerpt(raw)  # the same meaning, however it was cut
        name, data = fields(raw.head if isinstance(raw, Excerpt) else raw)
        if not data:
            return NOTHING
        self.last_data_at = now
        event = glimpse(name, data, raw.tail) if isinstance(raw, Excerpt) else read(name, data)
        self._note(event, data)
        if event.number is not None:
            self.last_sequence_number = event.number
        if isinstance(raw, bytes) and event.text:
            self._learn(raw, event)
        return event

    def _learn(self, raw: bytes, event: Event) -> None:
        """Makes a pattern of a content event that says nothing else. Its text must stand in it only once, so that what
        the pattern leaves open is the text and not, say, the type."""
        if event.finish is not None or event.counts is not None or len(raw) > PATTERN_BYTES:
            return
        if not event.text.isprintable():  # half a surrogate pair cannot be encoded
            return
        string, number = _encode(event.text), event.number
        if raw.count(string) == 1 and (number is None or NUMBER % number in raw):
            start = raw.index(string) + 1
            self._pattern = (raw[:start], raw[start + len(string) - 2 :], number)
            if number is not None:
                self._expect_next(number)

    def _expect_next(self, number: int) -> Pattern:
        """Event `number` fitted the pattern. The next event of a Responses stream differs in its number too."""
        was, will_be = NUMBER % number, NUMBER % (number + 1)
        before, after, _ = self._pattern
        self._pattern = before.replace(was, will_be), after.replace(was, will_be), number + 1
        return self._pattern
