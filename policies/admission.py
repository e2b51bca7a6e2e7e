"""How much may be in flight on a backend: the prefill gate, and a plain limit on requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from policies.backend import Backend, Ticket
from policies.estimate import Prefills
from policies.rules import Rules
from policies.types import ClassPolicy, Gate


class Admission(Protocol):
    """Says which backends are open, and to whom."""

    def gate(self, backend: Backend) -> Gate:
        """Whether the backend takes anything at all."""

    def fitting(self, ticket: Ticket, spare: Collection[Backend], now: float) -> list[Backend]:
        """Those of the open backends `spare` that can take this ticket now."""

    def below_ceiling(
        self, policy: ClassPolicy, spare: Collection[Backend], all_: Collection[Backend]
    ) -> list[Backend]:
        """Those of `spare` where a class with a ceiling may start something."""


class FixedConcurrency:
    """A backend takes work while it runs fewer requests than its concurrency."""

    def gate(self, backend: Backend) -> Gate:
        if not backend.view.open:
            return Gate.CLOSED
        return Gate.OPEN if backend.running < backend.view.concurrency else Gate.FULL

    def fitting(self, ticket: Ticket, spare: Collection[Backend], now: float) -> list[Backend]:
        return [backend for backend in spare if ticket.job.allows(backend.name)]

    def below_ceiling(
        self, policy: ClassPolicy, spare: Collection[Backend], all_: Collection[Backend]
    ) -> list[Backend]:
        return [b for b in spare if b.running < policy.ceiling * b.view.concurrency]


class PrefillGate:
    """Late binding by prefill: a backend takes a new prefill only when it has none, or a small one beside small ones.

    Decodes share a step, prefills do not: a second prefill on a backend delays the first and every stream there,
    while the queue could still have sent it elsewhere, or sent something better. The gate also stays shut while the
    KV memory is spoken for, and to a prefill that the streams there could not afford yet (see `Backend`): what a
    prefill costs a stream is learned from what earlier ones did (`losses`), what it lasts from how long they took
    (`times`).
    """

    def __init__(self, rules: Rules, times: Prefills, losses: Prefills) -> None:
        self.rules = rules
        self.times = times
        self.losses = losses

    def gate(self, backend: Backend) -> Gate:
        view = backend.view
        if not view.open:
            return Gate.CLOSED
        if backend.running >= view.concurrency:
            return Gate.FULL
        if view.kv_tokens is not None and self.kv(backend) > self.rules.kv_share * view.kv_tokens:
            return Gate.KV
        return Gate.OPEN if backend.in_flight < self.rules.budget_tokens else Gate.PREFILL

    def fitting(self, ticket: Ticket, spare: Collection[Backend], now: float) -> list[Backend]:
        cold, warm = ticket.cold, ticket.warm
        room, loss = self.rules.budget_tokens - cold, self._loss(ticket, cold)
        fits = []
        for backend in spare:
            if backend.name in warm:
                uncached = warm[backend.name]
                fit = self._fits(ticket, backend, uncached, now)
            elif backend.in_flight:
                fit = backend.in_flight <= room
            else:
                fit = loss <= 0.0 or self._affords(ticket, backend, cold, loss, now)
            if fit:
                fits.append(backend)
        return [b for b in fits if ticket.job.allows(b.name)] if ticket.restricted else fits

    def _fits(self, ticket: Ticket, backend: Backend, uncached: int, now: float) -> bool:
        if backend.in_flight:
            return backend.in_flight + uncached <= self.rules.budget_tokens
        loss = self._loss(ticket, uncached)
        return loss <= 0.0 or self._affords(ticket, backend, uncached, loss, now)

    def _loss(self, ticket: Ticket, uncached: int) -> float:
        if not self.rules.protect_streams:
            return 0.0
        return self.rules.loss_margin * self.losses.expect(uncached, ticket.job.prompt_tokens)

    def _affords(self, ticket: Ticket, backend: Backend, uncached: int, loss: float, now: float) -> bool:
        """Whether the streams can lose so much, or were given long enough to save for it."""
        if backend.credit(now) >= loss:
            return True
        longest = self.rules.longest_break * self.times.expect(uncached, ticket.job.prompt_tokens)
        if now >= backend.idle_since + longest:
            return True
        backend.need_s = min(backend.need_s, loss)
        backend.open_at = min(backend.open_at, backend.idle_since + longest)
        return False

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
