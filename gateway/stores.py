"""Where limits are counted: the seam between quotas and their stores, and the store of a single process."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from policies.limits import Book, Denied, Limit, Need, Standing

ClockUs = Callable[[], int]
"""Microseconds of a monotonic clock."""

Verdict = Denied | None


class StoreAway(Exception):
    """The store cannot be asked, and nothing may be decided without it."""


class Account(Protocol):
    """What one tenant uses of its limits."""

    limits: tuple[Limit, ...]

    def take(self, needs: Sequence[Need]) -> Verdict | Future[Verdict]:
        """Charge a request to all of its limits or to none; None where it is let through. Raises StoreAway, as the
        future may. A cancelled future charges nothing."""

    def give(self, index: int, cost: int) -> None:
        """Part of a charge comes back; what is less than nothing is charged on top."""

    def standing(self, index: int) -> Standing:
        """How a limit stands, as far as it is known here."""

    def retire(self) -> None:
        """No request is charged here any more; those that run will still give back."""


class Store(Protocol):
    """Keeps accounts. `async with store` runs what must run beside the requests."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def account(self, tenant: str, limits: Sequence[Limit], before: Account | None) -> Account:
        """An account for these limits; it goes on from the tenant's account under other limits, if there was one."""

    @property
    def mode(self) -> str:
        """How limits are counted now: `memory`, `shared`, or what the operator chose for want of the store."""

    @property
    def calls(self) -> Mapping[str, int]:
        """Round trips to the store so far, by outcome."""


class MemoryAccount:
    """Exact, and decided at once."""

    def __init__(self, book: Book, clock_us: ClockUs) -> None:
        self.limits = book.limits
        self.book = book
        self._clock_us = clock_us

    def __repr__(self) -> str:
        return f"<MemoryAccount {self.book!r}>"

    def take(self, needs: Sequence[Need]) -> Verdict:
        return self.book.take(needs, self._clock_us())

    def give(self, index: int, cost: int) -> None:
        self.book.give(index, cost, self._clock_us())

    def retire(self) -> None:
        pass

    def standing(self, index: int) -> Standing:
        return self.book.standing(index, self._clock_us())


class MemoryStore:
    """For one process: nothing is shared and nothing outlives it."""

    mode = "memory"

    def __init__(self, clock_us: ClockUs) -> None:
        self._clock_us = clock_us
        self.calls: Mapping[str, int] = {}

    async def __aenter__(self) -> MemoryStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def account(self, tenant: str, limits: Sequence[Limit], before: Account | None) -> MemoryAccount:
        book = Book(limits)
        if isinstance(before, MemoryAccount):
            book.inherit(before.book, self._clock_us())
        return MemoryAccount(book, self._clock_us)
