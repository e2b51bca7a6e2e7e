"""How much may be in flight on a backend: the prefill gate, and a plain limit on requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from policies.backend import Backend, Ticket
from policies.rules import Rules
from policies.types import ClassPolicy, Gate


class Admission(Protocol):
    """Says which backends are open, and to whom."""

    def gate(self, backend: Backend, now: float) -> Gate:
        """Whether the backend takes anything at all."""

    def fitting(self, ticket: Ticket, spare: Collection[Backend]) -> list[Backend]:
        """Those of the open backends `spare` that can take this ticket."""

    def below_ceiling(
        self, policy: ClassPolicy, spare: Collection[Backend], all_: Collection[Backend]
    ) -> list[Backend]:
        """Those of `spare` where a class with a ceiling may start something."""


class FixedConcurrency:
    """A backend takes work while it runs fewer requests than its concurrency."""

    def gate(self, backend: Backend, now: float) -> Gate:
        if not backend.view.open:
            return Gate.CLOSED
        return Gate.OPEN if backend.running < backend.view.concurrency else Gate.FULL

    def fitting(self, ticket: Ticket, spare: Collection[Backend]) -> list[Backend]:
        return [backend for backend in spare if ticket.job.allows(backend.name)]

    def below_ceiling(
        self, policy: ClassPolicy, spare: Collection[Backend], all_: Collection[Backend]
    ) -> list[Backend]:
        return [b for b in spare if b.running < policy.ceiling * b.view.concurrency]


class PrefillGate:
    """Late binding by prefill: a backend takes a new prefill only when it has none, or a small one beside small ones.

    Decodes share a step, prefills do not: a second prefill on a backend delays the first and every stream there,
    while the queue could still have sent it elsewhere, or sent something better. On top of that the gate stays
    shut while the streams are owed tokens (see `Backend`), and when the KV memory is spoken for.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def gate(self, backend: Backend, now: float) -> Gate:
        view = backend.view
        if not view.open:
            return Gate.CLOSED
        if backend.running >= view.concurrency:
            return Gate.FULL
        if view.kv_tokens is not None and self.kv(backend) > self.rules.kv_share * view.kv_tokens:
            return Gate.KV
        if backend.in_flight:
            return Gate.OPEN if backend.in_flight < self.rules.budget_tokens else Gate.PREFILL
        return Gate.DEBT if backend.debt(now) > 0.0 else Gate.OPEN

    def fitting(self, ticket: Ticket, spare: Collection[Backend]) -> list[Backend]:
        room = self.rules.budget_tokens - ticket.cold
        fits = [b for b in spare if not b.in_flight or b.in_flight <= room]
        if ticket.warm:
            warm = ticket.warm
            room = self.rules.budget_tokens
            fits += [
                b
                for b in spare
                if b.name in warm and b.in_flight and room - b.in_flight - warm[b.name] >= 0 and b not in fits
            ]
        return [b for b in fits if ticket.job.allows(b.name)] if ticket.restricted else fits

    def below_ceiling(
        self, policy: ClassPolicy, spare: Collection[Backend], all_: Collection[Backend]
    ) -> list[Backend]:
        if sum(1 for b in all_ if b.in_flight) >= policy.ceiling * len(all_):
            return []
        kv = policy.kv_ceiling
        return [b for b in spare if not b.in_flight and (not b.view.kv_tokens or self.kv(b) < kv * b.view.kv_tokens)]

    @staticmethod
    def kv(backend: Backend) -> int:
        """KV tokens taken there: by own count, or by the engine's where others use it too."""
        return max(backend.kv, backend.view.kv_used or 0)
