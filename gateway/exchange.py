"""The record of one request: who asked, what was asked, and all that happened. The path writes it; telemetry
reads it once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Protocol

from gateway.backend import Backend
from gateway.catalog import Canary, Tenant
from gateway.errors import UPSTREAM_ERROR, ClientGone, Fault, GatewayError
from gateway.tracecontext import Trace
from policies.types import Dispatch, Usage

Header = tuple[bytes, bytes]
REJECTED = "upstream_rejected"  # the outcome where the backend blames the request
WHERE, CACHED = b"x-headrace-backend", b"x-headrace-cache"


class Dialect(StrEnum):
    """Whose shapes an endpoint speaks: of its errors, its stream events and its usage."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An inference path. `generates` is True where the answer is made of tokens, `salts` where engines that can keep
    caches apart by a salt do so."""

    path: str
    dialect: Dialect = Dialect.OTHER
    generates: bool = False
    salts: bool = True

    @property
    def target(self) -> bytes:
        """The path as a request line has it."""
        return self.path.encode()


@dataclass(slots=True)
class Call:
    """What was asked, ready to be sent: `body` is the client's bytes, spliced where an edit was needed.

    `model` is the client's word; `label` the configured name, or `other` where clients may use any. `target` is the
    path and query, `headers` all that go to the backend but its own credential. `tier` is the client's `service_tier`,
    `class_` the class that its header names, `deadline_s` the seconds after which it will not wait for a first token
    any more, `again` that its SDK has asked before. `strip_usage`: the gateway itself asked for the usage chunk.
    `fallback` are the pools to ask when `pool` cannot serve it. Where its model has a `canary`, `among` are the
    backends to try first: those that are named, or with False the others. `prompt` holds the raw JSON of what an
    engine makes the prompt of, in an order that a growing conversation only adds to.
    """

    endpoint: Endpoint
    model: str
    label: str
    pool: str
    body: list[bytes | memoryview]
    stream: bool = False
    strip_usage: bool = False
    tier: str | None = None
    class_: str = ""
    deadline_s: float | None = None
    again: bool = False
    fallback: tuple[str, ...] = ()
    canary: Canary | None = None
    among: tuple[frozenset[str], bool] | None = None
    prompt: list[memoryview] = field(default_factory=list)
    max_tokens: int | None = None
    target: bytes = b""
    headers: list[Header] = field(default_factory=list)
    length: int = field(init=False)
    prompt_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = sum(map(len, self.body))
        self.prompt_bytes = sum(map(len, self.prompt))


class Metered(Protocol):
    """What a meter knows of an answer when it is over. Times are seconds on the gateway's monotonic clock."""

    @property
    def first_token_at(self) -> float | None: ...
    @property
    def bytes_in(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def gap_counts(self) -> list[int]: ...
    @property
    def gap_sum(self) -> float: ...
    @property
    def parse_errors(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def error(self) -> bytes | None: ...


@dataclass(slots=True)
class Tally:
    """Tokens that all streams of one backend got, after the first of each."""

    tokens: int = 0


@dataclass(slots=True)
class Attempt:
    """One try on one backend. Times are seconds on the gateway's monotonic clock. Whoever reads the answer calls
    `on_first_token`, until when the backend is busy with the prompt, and adds later tokens to the backend's `tally`.
    `decision` says why it went where it went; `trace_headers` tell the backend which span it works for; `cost` is its
    part of the backend's price. `failure` is the word for why it did not end well, `failed` whether that was its
    backend's doing. `trial`: its ending decides whether the backend is trusted again; `late`: others were served long
    before. `number` counts from 1. A `hedge` was made beside another attempt; one that has `lost` was given up for the
    other of the two."""

    backend: Backend
    decision: Dispatch
    dispatched_at: float
    on_first_token: Callable[[float], None]
    tally: Tally = field(default_factory=Tally)
    trace_headers: list[Header] = field(default_factory=list)
    connected_at: float = 0.0
    head_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    failure: str = ""
    failed: bool = False
    cost: float = 0.0
    trial: bool = False
    late: bool = False
    number: int = 1
    hedge: bool = False
    lost: bool = False


class Race(Protocol):
    """Of two attempts at once one may answer."""

    def began(self, attempt: Attempt) -> None: ...
    def won(self, attempt: Attempt) -> None: ...


@dataclass(slots=True, eq=False)
class Exchange:
    """One request from accept to settle. `generation` numbers the configuration that it began with. The last of the
    `attempts` is the one that counts: it answers, or may yet."""

    request_id: str
    received_at: float
    endpoint: Endpoint
    trace: Trace | None = None
    tenant: Tenant | None = None
    call: Call | None = None
    class_: str = "interactive"
    queued_at: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    race: Race | None = None
    meter: Metered | None = None
    status: int = 0
    outcome: str = ""
    fault: Fault = Fault.NONE
    upstream_request_id: str = ""
    answer_headers: list[Header] = field(default_factory=list)
    bytes_in: int = 0
    bytes_out: int = 0
    ended_at: float = 0.0
    generation: int = 0

    def identify(self, tenant: Tenant, call: Call) -> None:
        """Who asks for what: known once the key and the body were read. Its class is the one asked for, by header or
        by service tier, if the tenant may use it."""
        self.tenant = tenant
        self.call = call
        asked = call.class_ or ("batch" if call.tier == "flex" else "interactive")
        self.class_ = asked if asked in tenant.classes else tenant.classes[0]
        self.answer_headers.append((b"x-headrace-class", self.class_.encode()))

    def turn_to(self, attempt: Attempt) -> None:
        """`attempt` is the one that counts now. An operator sees in the answer where it went and what was expected
        there; nobody else may: the answers to one tenant would tell it of another's prompts."""
        if attempt in self.attempts:
            self.attempts.remove(attempt)
        self.attempts.append(attempt)
        if self.tenant is not None and self.tenant.operator:
            headers = [header for header in self.answer_headers if header[0] not in (WHERE, CACHED)]
            told = [(WHERE, attempt.backend.name.encode()), (CACHED, b"%d" % attempt.decision.cached_tokens)]
            self.answer_headers = headers + told

    def commit(self, attempt: Attempt, meter: Metered | None = None) -> None:
        """What `attempt` brings goes to the client from here on, counted by `meter`, and nothing else will."""
        self.meter = meter
        if self.race is not None:
            self.race.won(attempt)

    @property
    def in_order(self) -> list[Attempt]:
        """The attempts as they began."""
        return self.attempts if len(self.attempts) < 2 else sorted(self.attempts, key=attrgetter("number"))

    def waits(self) -> Iterator[tuple[float, float]]:
        """From when to when it waited for a backend: before each attempt that had no other beside it, or for one that
        never came."""
        since = self.queued_at
        if not since:
            return
        for attempt in self.in_order:
            if attempt.dispatched_at >= since:
                yield since, attempt.dispatched_at
            since = max(since, attempt.ended_at or attempt.dispatched_at)
        if not self.attempts:
            yield since, self.ended_at

    @property
    def queue_wait_s(self) -> float:
        """Time spent waiting for a backend, all attempts together, and at last for another one that never came."""
        waited_s = sum(until - since for since, until in self.waits())
        if self.attempts and self.attempts[-1].failed:
            waited_s += self.ended_at - max(attempt.ended_at for attempt in self.attempts)
        return waited_s

    @property
    def ttft_s(self) -> float | None:
        """From accept to the first token; None where the answer was not a stream of tokens."""
        first = self.meter.first_token_at if self.meter is not None else None
        return None if first is None else first - self.received_at

    def let_go(self) -> None:
        """Drop the request's body. Meters, slots and tracebacks refer to this record in circles, which stand until the
        next collection: a body must not stand with them."""
        if self.call is not None:
            self.call.body.clear()
            self.call.prompt.clear()

    def end(self, now: float, error: GatewayError | None = None) -> None:
        """Settle the outcome: one word for logs and metrics."""
        self.ended_at = now
        if isinstance(error, ClientGone) and self.meter is not None:
            if self.meter.error is not None:  # it was told: clients hang up on an error frame, too
                error, self.outcome = None, UPSTREAM_ERROR.reason
            elif self.meter.complete:
                error = None  # it had its whole answer: clients hang up on [DONE]
        if error is not None:
            self.outcome = error.refusal.reason
            self.status = self.status or error.refusal.status
            self.fault = error.fault
        elif not self.outcome:
            self.outcome = "ok"
        else:  # an answer was relayed, but none to be glad of
            self.fault = Fault.CALLER if self.outcome == REJECTED else Fault.BACKEND
