"""The backends of one pool: where they come from, what was said of them, and what the scheduler is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.backend import Backend
from gateway.discovery import Source
from gateway.pool import Pool
from gateway.watch import Plan, Sight, Watch
from policies.types import BackendView
from policies.verdicts import State

FRESH_S = 2.0  # an engine's word on its memory is worth nothing after so long
# Without a configured concurrency: as many requests as the KV memory holds at so many tokens each. An engine that is
# given more queues them itself, where nobody can reorder them.
TOKENS_EACH = 1024
LEAST = 16


@dataclass(slots=True)
class Member:
    """One backend of a pool, and who watches it."""

    backend: Backend
    watch: Watch
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class Search:
    """Where backends are looked for, how one is made of a URL, and what tells one search from another."""

    source: Source
    make: Callable[[str], Backend]
    key: object


@dataclass(slots=True)
class Roster:
    """One pool: where its backends come from, and what was said of them at run time."""

    pool: Pool
    plan: Plan
    found: dict[str, Backend] = field(default_factory=dict)  # configured, or discovered
    added: dict[str, Backend] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    leaving: frozenset[str] = frozenset()  # discovery says that they only finish what they have
    members: dict[str, Member] = field(default_factory=dict)
    sights: dict[str, Sight] = field(default_factory=dict)  # what is known of each, whoever watches it
    told: dict[str, State] = field(default_factory=dict)  # what each was last said to be, whoever watched it then
    search: Search | None = None
    searching: asyncio.Task[None] | None = None

    def present(self) -> list[Backend]:
        """The backends now."""
        return [each for name, each in (self.found | self.added).items() if name not in self.removed]

    def useless(self, name: str) -> bool:
        """Whether a backend serves none of the pool's models."""
        eligible = self.pool.eligible
        return bool(eligible.wanted) and len(eligible.lacks(name)) == len(eligible.wanted)

    def states(self, now: float) -> Iterator[tuple[Backend, str]]:
        """Every backend with one word for what it is."""
        for name, backend in self.pool.backends.items():
            state = self.pool.health.state(name, now).value
            if name in self.drained or name in self.leaving:
                state = "draining"
            elif self.useless(name):
                state = "wrong_model"
            yield backend, state

    def views(self, now: float) -> list[BackendView]:
        """What is known of each."""
        return [self._view(name, backend, now) for name, backend in self.pool.backends.items()]

    def _view(self, name: str, backend: Backend, now: float) -> BackendView:
        opens = name not in self.drained and name not in self.leaving and not self.useless(name)
        sight = self.sights[name]
        fits = sight.signals.kv_tokens
        most = backend.concurrency
        if backend.bounds_itself and fits is not None:
            most = min(most, max(LEAST, fits // TOKENS_EACH))
        return BackendView(
            name,
            incarnation=sight.incarnation,
            concurrency=most,
            kv_tokens=fits,
            kv_used=sight.signals.kv_used if now - sight.signals_at < FRESH_S else None,
            speed=backend.speed,
            open=opens,
        )
