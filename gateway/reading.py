"""What a meter knows of an answer, and the meter of answers that are one JSON body."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from enum import StrEnum

from gateway.dialects import Event, glimpse_answer, read_answer
from gateway.exchange import Dialect, Tally
from gateway.frames import HOLD_BYTES, Excerpt
from gateway.usage import Counts
from policies.types import Usage

# Upper bounds, inclusive, of the classes of gaps between tokens; one more class takes what is longer. They lie close
# together where objectives lie (10 to 100 ms), so that an objective can be a bound.
_MS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10_000)
GAP_BOUNDS_S = tuple(bound / 1000 for bound in _MS)
ERROR_BYTES = 4 * 1024  # kept of an error event


class StreamEnding(StrEnum):
    """How an answer ended, as far as its bytes tell."""

    COMPLETE = "complete"  # a finish reason was seen, of every choice if it broke off, and no error
    ERROR = "error"
    TRUNCATED = "truncated"
    EMPTY = "empty"  # not one event


class Reading:
    """What a meter knows of an answer so far. Times are in seconds, on the clock of the caller.

    `tokens` counts content events until the engine reports its own count. `gap_counts[i]` counts the gaps between
    tokens up to `GAP_BOUNDS_S[i]`: where n come in one read after g seconds, n gaps of g/n; those that come in one
    read with the first have no gap. `last_data_at` is the last time that anything came; after the finish reason only
    events count as anything. `error` is the beginning of the first error event.
    """

    def __init__(
        self, dialect: Dialect, on_first_token: Callable[[float], None] | None = None, tally: Tally | None = None
    ) -> None:
        """`on_first_token` is called once, with the time of the first token; those that come later go to `tally`."""
        self.dialect = dialect
        self.first_token_at: float | None = None
        self.last_data_at: float | None = None
        self.events = 0
        self.tokens = 0
        self.gap_counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self.finish: str | None = None
        self._begun = self._over = 0  # choices, a bit for each
        self.error: bytes | None = None
        self.done = False
        self.parse_errors = 0
        self.bytes_in = 0
        self._counts: Counts | None = None
        self._last_token_at = 0.0
        self._on_first_token = on_first_token
        self._tally = tally or Tally()
        self._ended = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dialect} [{self.events} events, {self.tokens} tokens | {self.ending}]>"

    @property
    def usage(self) -> Usage | None:
        """What the engine reported; where it reported the prompt only, with the output counted here."""
        counts = self._counts
        if counts is None:
            return None
        return Usage(counts.prompt or 0, self.tokens if counts.output is None else counts.output, counts.cached)

    @property
    def gap_sum(self) -> float:
        """The sum of all gaps, in seconds."""
        return 0.0 if self.first_token_at is None else self._last_token_at - self.first_token_at

    @property
    def ending(self) -> StreamEnding:
        if self.error is not None:
            return StreamEnding.ERROR
        if self.finish is not None and (self.done or not self._begun & ~self._over):
            return StreamEnding.COMPLETE
        if self.events == 0:
            return StreamEnding.EMPTY
        # Other dialects need not give a reason: a clean end is all that there is to see.
        return StreamEnding.COMPLETE if self._ended and self.dialect is Dialect.OTHER else StreamEnding.TRUNCATED

    @property
    def complete(self) -> bool:
        return self.ending is StreamEnding.COMPLETE

    def _note(self, event: Event, data: bytes) -> None:
        """One event, or a whole answer, with its data."""
        self.events += 1
        self.tokens += event.content
        self.parse_errors += event.broken
        self.done = self.done or event.done
        self.finish = event.finish or self.finish
        self._begun |= event.begun
        self._over |= event.over
        if event.counts is not None:
            self._counts = event.counts.over(self._counts)
            if event.counts.output is not None:
                self.tokens = event.counts.output
        if event.error and self.error is None:
            self.error = data[:ERROR_BYTES]

    def _came(self, tokens: int, now: float) -> None:
        """`tokens` content events came together, at `now`."""
        if self.first_token_at is None:
            self.first_token_at = self._last_token_at = now
            self.gap_counts[0] += tokens - 1
            if self._on_first_token is not None:
                self._on_first_token(now)
            return
        self._tally.tokens += tokens
        gap = now - self._last_token_at
        self.gap_counts[bisect_left(GAP_BOUNDS_S, gap / tokens)] += tokens
        if gap > 0.0:
            self._last_token_at = now


class BodyMeter(Reading):
    """Sees the bytes of an answer that is one JSON body, cut anywhere. They pass as they come.

    It is complete when it ended and is what its dialect promises, a JSON object without an error. It has no first
    token: only a stream has one.
    """

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._body: bytearray | Excerpt = bytearray()

    @property
    def ending(self) -> StreamEnding:
        if self.error is not None:
            return StreamEnding.ERROR
        if self.bytes_in == 0:
            return StreamEnding.EMPTY
        sound = self._ended and (self.parse_errors == 0 or self.dialect is Dialect.OTHER)
        return StreamEnding.COMPLETE if sound else StreamEnding.TRUNCATED

    def feed(self, data: bytes, now: float) -> bytes:
        """Bytes that came in at `now`; all of them may go out."""
        self.bytes_in += len(data)
        self.last_data_at = now
        body = self._body
        if isinstance(body, Excerpt):
            body.add(data)
        elif len(body) + len(data) <= HOLD_BYTES:
            body += data
        else:
            self._body = Excerpt(bytes(body) + data)
        return data

    def end(self, now: float) -> bytes:
        """The answer is whole: read it. Nothing was held back."""
        body, self._body, self._ended = self._body, bytearray(), True
        if isinstance(body, Excerpt):
            self._note(glimpse_answer(body.head, body.tail), body.head)
        elif body:
            self._note(read_answer(bytes(body)), bytes(body))
        return b""

    def broken(self) -> bytes:
        """No more will come. Nothing can follow a JSON body that broke."""
        self._body = bytearray()
        return b""
