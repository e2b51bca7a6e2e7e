"""Limits that replicas share through Redis or Valkey, by leases.

A request that the lease covers is decided at once. Others wait for one round trip of their tenant, which decides all
that wait and reports, returns and renews the tenant's leases with it. Requests never talk to the store themselves: one
that is cancelled leaves a future behind, and what it was charged comes back. Where the store is away, the operator's
choice decides.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future, Task
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from gateway.redislink import Link, Target
from gateway.stores import Account, ClockUs, StoreAway, Verdict
from policies.leases import LEASE_US, Lease
from policies.limits import Limit, Need, Standing, converted, longest

BEAT_S = 2.0  # between two reports of a tenant who is served by leases alone
WATCH_S = 0.25  # between two looks at a store that is away
SETTLE_US = 500_000  # from the store's return until it decides again: by then all replicas have told what they spent
SOON_S = 0.02  # what comes back near a limit is told to the store after so long, together with what else does
GOODBYE_S = 0.25  # for giving everything back at the end
MANY = 1_000_000  # replicas

OnFailure = Literal["local_share", "deny", "allow"]

logger = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for the store."""

    needs: Sequence[Need]
    verdict: Future[Verdict]


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
        try:
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*(account.leave() for account in self.accounts))
                await self._count(here=0)
        except (TimeoutError, StoreAway):
            pass  # what is left lapses by itself
        self.link.close()

    def account(self, tenant: str, limits: Sequence[Limit], before: Account | None) -> SharedAccount:
        account = SharedAccount(self, tenant, limits)
        self.accounts.add(account)
        if isinstance(before, SharedAccount):
            account.inherit(before)
        return account

    async def _run(self) -> None:
        beats = 0.0
        while True:
            await asyncio.sleep(WATCH_S)
            beats += WATCH_S
            if not self.link.up:
                await self.link.watch()
            if beats >= BEAT_S or self.link.up != self._was_up:
                beats = 0.0
                await self._beat()

    async def _beat(self) -> None:
        if self.link.up != self._was_up:
            self._turn()
        try:
            await self._count()
        except StoreAway:
            return
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


class SharedAccount:
    """What one tenant uses, as this replica sees it."""

    def __init__(self, store: SharedStore, tenant: str, limits: Sequence[Limit]) -> None:
        self.limits = tuple(limits)
        self.leases = [Lease(limit) for limit in limits]
        self.retired = False
        tag = quote(tenant, safe="")
        self._keys = [f"headrace:{{{tag}}}:{quote(limit.model, safe='')}:{limit.kind}" for limit in limits]
        self._store = store
        self._waiting: list[Waiting] = []
        self._syncing: Task[None] | None = None
        self._soon: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<SharedAccount {len(self._waiting)} waiting, {self.leases}>"

    def active(self) -> bool:
        """Whether the store has to be told anything, or told again."""
        return any(lease.active() for lease in self.leases)

    def take(self, needs: Sequence[Need]) -> Verdict | Future[Verdict]:
        store, leases = self._store, self.leases
        now = store.clock_us()
        for index, cost in needs:
            if not leases[index].holds(cost, now):
                break
        else:
            for index, cost in needs:
                leases[index].spend(cost)
            return None
        if not store.decides(self._keys[0], now):
            return self._decide_alone(needs, now)
        verdict = longest([no for index, cost in needs if (no := leases[index].denies(cost, now)) is not None])
        if verdict is not None:
            return verdict
        future: Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(needs, future))
        self.kick()
        return future

    def give(self, index: int, cost: int) -> None:
        store = self._store
        now, lease = store.clock_us(), self.leases[index]
        lease.give(cost, now, store.replicas)
        if self._soon is None and lease.tight(now):
            self._soon = asyncio.get_running_loop().call_later(SOON_S, self._tell)

    def standing(self, index: int) -> Standing:
        return self.leases[index].standing(self._store.clock_us())

    def inherit(self, before: SharedAccount) -> None:
        """The store keeps what is used; for the time without it, what is known here is taken along."""
        before.retired = True
        now = self._store.clock_us()
        known = {(lease.limit.kind, lease.limit.model): lease.tally for lease in before.leases}
        for lease in self.leases:
            old = known.get((lease.limit.kind, lease.limit.model))
            if old is not None:
                lease.tally.set(converted(old.used(now), old.limit, lease.limit), now)

    def returned(self) -> None:
        """The store is back."""
        now = self._store.clock_us()
        for lease in self.leases:
            lease.returned(now, self._store.replicas)

    def kick(self) -> None:
        """See to it that the store is told and asked, if that is not under way already."""
        if self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync_all())

    async def leave(self) -> None:
        """Give back what is held."""
        while self._syncing is not None:
            await asyncio.wait([self._syncing])
        if self.active():
            await self.sync(leaving=True)

    def _tell(self) -> None:
        self._soon = None
        self.kick()

    async def _sync_all(self) -> None:
        try:
            await self.sync()
            while self._waiting:
                await self.sync()
        finally:
            self._syncing = None

    async def sync(self, *, leaving: bool = False) -> None:
        """One round trip. Whoever waits is told; those who come while it is under way wait for the next one, but for
        those whom a lease covers by then."""
        store, now = self._store, self._store.clock_us()
        batch, self._waiting = [waiting for waiting in self._waiting if not waiting.verdict.done()], []
        if not store.link.reaches(self._keys[0]):
            self._without(batch)
            return
        asked: dict[int, int] = {}
        for index, cost in (need for waiting in batch for need in waiting.needs):
            asked[index] = max(asked.get(index, 0), 0 if self.leases[index].holds(cost, now) else cost)
        indexes = [i for i, lease in enumerate(self.leases) if i in asked or lease.active()]
        if not indexes:
            return
        arguments: list[str | int] = [store.replica, LEASE_US, 2 * store.replicas, len(batch)]
        for i in indexes:
            limit, told = self.leases[i].limit, self.leases[i].report(now, asked.get(i, 0), leaving=leaving)
            arguments += (int(limit.drains), limit.room, *told)
        for waiting in batch:
            costs = dict(waiting.needs)
            arguments += [costs.get(i, 0) for i in indexes]
        try:
            reply = await store.link.run([self._keys[i] for i in indexes], arguments)
        except StoreAway:
            self._without(batch)
            return
        for place, i in enumerate(indexes):
            free, used, extra = reply[3 * place : 3 * place + 3]
            self.leases[i].renewed(free, used, extra, now)
        self._tell_all(batch, reply[3 * len(indexes) :])

    def _tell_all(self, batch: Sequence[Waiting], verdicts: Sequence[int]) -> None:
        now = self._store.clock_us()
        for waiting, fits in zip(batch, verdicts, strict=True):
            if fits:
                for index, cost in waiting.needs:
                    self.leases[index].admitted(cost)
            if waiting.verdict.done():  # cancelled: it takes nothing with it
                if fits:
                    for index, cost in waiting.needs:
                        self.give(index, cost)
            elif fits:
                waiting.verdict.set_result(None)
            else:
                refusals = [no for index, cost in waiting.needs if (no := self.leases[index].refused(cost, now))]
                waiting.verdict.set_result(longest(refusals))
        self._waiting = [waiting for waiting in self._waiting if not self._covered(waiting, now)]

    def _covered(self, waiting: Waiting, now: int) -> bool:
        """Whether it need not wait any more."""
        if waiting.verdict.done():
            return True
        if not all(self.leases[index].holds(cost, now) for index, cost in waiting.needs):
            return False
        for index, cost in waiting.needs:
            self.leases[index].spend(cost)
        waiting.verdict.set_result(None)
        return True

    def _without(self, batch: Sequence[Waiting]) -> None:
        """The store did not answer: nobody waits for it again."""
        now = self._store.clock_us()
        waiting, self._waiting = [*batch, *self._waiting], []
        for each in waiting:
            if each.verdict.done():
                continue
            try:
                each.verdict.set_result(self._decide_alone(each.needs, now))
            except StoreAway as away:
                each.verdict.set_exception(away)

    def _decide_alone(self, needs: Sequence[Need], now: int) -> Verdict:
        store = self._store
        if store.on_failure == "deny":
            raise StoreAway(store.link.why)
        share = store.replicas
        if store.on_failure == "local_share":
            refusals = [no for i, cost in needs if (no := self.leases[i].denies_alone(cost, now, share)) is not None]
            if refusals:
                return longest(refusals)
        for index, cost in needs:
            self.leases[index].spend_alone(cost, now, share)
        return None
