"""Limits that replicas share through Redis or Valkey. Where that is away, the operator's choice decides, and what
happened meanwhile is told when it is back."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Task
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from gateway.redislink import Link, Target
from gateway.sharedaccount import OnFailure, SharedAccount
from gateway.stores import Account, ClockUs, StoreAway
from policies.leases import LEASE_US
from policies.limits import Limit

BEAT_US = 2_000_000  # between two reports of a tenant who is served by leases alone
WATCH_S = 0.25  # between two looks at a store that is away
SETTLE_US = 500_000  # from the store's return until it decides again: by then all replicas have told what they spent
GOODBYE_S = 0.25  # for giving everything back at the end
MANY = 1_000_000  # replicas

logger = logging.getLogger("headrace")


class SharedStore:
    """`async with store` runs its beat: replicas are counted, leases renewed, a lost store looked for."""

    def __init__(self, url: str, on_failure: OnFailure, clock_us: ClockUs, *, replica: str, replicas: int = 1) -> None:
        """`replica` is a name that no other one has; `replicas` is how many share the limits, until they have met."""
        script = Path(__file__).with_name("quota.lua").read_text()
        probe = (1, "headrace:{probe}", replica, 1000, 1, 0, 0, MANY, 1, 0, 0, 0, 0)
        self.link = Link(Target.of(url), script, probe)
        self.on_failure = on_failure
        self.clock_us = clock_us
        self.replica = replica
        self.replicas = replicas
        self.accounts: set[SharedAccount] = set()
        self._beating: Task[None] | None = None
        self._was_up = True
        self._alone_until = 0
        self._serial = count()

    def __repr__(self) -> str:
        return f"<SharedStore {self.mode}, {self.replicas} replicas, {self.link!r}>"

    @property
    def mode(self) -> str:
        return "shared" if self.link.up and self.clock_us() >= self._alone_until else self.on_failure

    def decides(self, key: str, now: int) -> bool:
        """Whether the store is to be asked about a key."""
        return now >= self._alone_until and self.link.reaches(key)

    @property
    def calls(self) -> dict[str, int]:
        return self.link.calls

    async def __aenter__(self) -> SharedStore:
        await self.link.watch()
        await self._beat()
        self._beating = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
        with suppress(TimeoutError, StoreAway):  # what is left lapses by itself
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*(account.leave() for account in self.accounts))
                await self._count(here=0)
        self.link.close()

    def account(self, tenant: str, limits: Sequence[Limit], before: Account | None) -> SharedAccount:
        account = SharedAccount(self, tenant, limits, owner=f"{self.replica}-{next(self._serial)}")
        self.accounts.add(account)
        if isinstance(before, SharedAccount):
            account.inherit(before)
        return account

    async def _run(self) -> None:
        beat_at = self.clock_us()
        while True:
            await asyncio.sleep(WATCH_S)
            await self.link.watch()  # which takes its time where a node is silent: leases with the others go on
            if (now := self.clock_us()) >= beat_at + BEAT_US or self.link.up != self._was_up:
                beat_at = now
                await self._beat()

    async def _beat(self) -> None:
        if self.link.up != self._was_up:
            self._turn()
        with suppress(StoreAway):
            await self._count()
        for account in tuple(self.accounts):
            if account.active():
                account.kick()
            elif account.retired:
                self.accounts.discard(account)

    def _turn(self) -> None:
        """The store has come back, or gone away."""
        self._was_up = self.link.up
        if not self.link.up:
            logger.warning("limits: the store is away, %s: %s until it is back", self.link.why, self.on_failure)
            return
        self._alone_until = self.clock_us() + SETTLE_US
        logger.warning("limits: counted in the store, by %d replicas so far", self.replicas)
        for account in self.accounts:
            account.returned()

    async def _count(self, here: int = 1) -> None:
        """Every replica runs one request at once on a limit of its own: how many there are is what is not free."""
        arguments = (self.replica, LEASE_US, MANY, 0, 0, MANY, here, 0, 0, 0, 0)
        free, *_ = await self.link.run(["headrace:{replicas}"], arguments)
        self.replicas = max(1, MANY - free)
