"""The record of one request: who asked, what was asked, and all that happened. The path writes it; telemetry
reads it once, at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gateway.backend import Backend
from gateway.errors import ClientGone, GatewayError
from policies.types import Job, Usage

Header = tuple[bytes, bytes]


class Dialect(StrEnum):
    """Whose shapes an endpoint speaks: of its errors, its stream events and its usage."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An inference path. `generates` is True where the answer is made of tokens."""

    path: str
    dialect: Dialect = Dialect.OTHER
    multipart: bool = False
    generates: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays. `models` are shell globs over model names."""

    name: str
    models: tuple[str, ...] = ("*",)
    classes: tuple[str, ...] = ("interactive", "batch")
    weight: float = 1.0
    trust_group: str = ""
    operator: bool = False


@dataclass(slots=True)
class Call:
    """What was asked, ready to be sent: `body` is the client's bytes, spliced where an edit was needed."""

    endpoint: Endpoint
    model: str
    pool: str
    body: list[bytes]
    length: int
    stream: bool = False
    strip_usage: bool = False
    prompt_tokens: int = 0
    max_tokens: int | None = None
    target: bytes = b""
    headers: list[Header] = field(default_factory=list)


class Metered(Protocol):
    """What a meter knows of an answer when it is over."""

    first_token_at: float | None
    tokens: int
    usage: Usage | None
    gap_counts: list[int]
    gap_sum: float

    @property
    def complete(self) -> bool: ...


@dataclass(slots=True)
class Attempt:
    """One try on one backend. Times are seconds on the gateway's monotonic clock."""

    backend: Backend
    dispatched_at: float
    connected_at: float = 0.0
    head_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    failure: str = ""


@dataclass(slots=True)
class Exchange:
    """One request from accept to settle."""

    request_id: str
    received_at: float
    endpoint: Endpoint | None = None
    tenant: Tenant | None = None
    call: Call | None = None
    class_: str = "interactive"
    queued_at: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    meter: Metered | None = None
    status: int = 0
    outcome: str = ""
    upstream_request_id: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    ended_at: float = 0.0

    def identify(self, tenant: Tenant, call: Call) -> None:
        """Who asks for what: known once the key and the body were read."""
        self.tenant = tenant
        self.call = call

    def job(self, number: int, now: float) -> Job:
        """What the scheduler sees of this request; backends tried before are excluded."""
        assert self.tenant is not None and self.call is not None
        return Job(
            id=number,
            tenant=self.tenant.name,
            weight=self.tenant.weight,
            arrived=self.received_at,
            class_=self.class_,
            prompt_tokens=self.call.prompt_tokens,
            output_tokens=self.call.max_tokens or 0,
            streamed=self.call.stream,
            tried=frozenset(attempt.backend.name for attempt in self.attempts),
        )

    def end(self, now: float, error: GatewayError | None = None) -> None:
        """Settle the outcome: one word for logs and metrics."""
        self.ended_at = now
        if isinstance(error, ClientGone) and self.meter is not None and self.meter.complete:
            error = None  # it had its whole answer: clients hang up on [DONE]
        if error is not None:
            self.outcome = error.refusal.reason
            self.status = self.status or error.refusal.status
        elif not self.outcome:
            self.outcome = "ok"
