"""What one tenant uses of limits that replicas share, as one replica sees it, by leases.

A request that the leases cover is decided at once. Others wait for one round trip of their tenant, which decides all
that wait and reports, returns and renews the tenant's leases with it. Requests never talk to the store themselves: one
that is cancelled leaves a future behind, and what it was charged comes back.
"""

from __future__ import annotations

import asyncio
from asyncio import Future, Task
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import quote

from gateway.redislink import Link
from gateway.stores import ClockUs, StoreAway, Verdict
from policies.leases import LEASE_US, Lease
from policies.limits import Limit, Need, Standing, converted, longest

SOON_S = 0.02  # what comes back near a limit is told to the store after so long, together with what else does

OnFailure = Literal["local_share", "deny", "allow"]


class Sharing(Protocol):
    """What an account needs of its store."""

    link: Link
    on_failure: OnFailure
    replicas: int
    clock_us: ClockUs

    def decides(self, key: str, now: int) -> bool:
        """Whether the store is to be asked about a key."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for the store."""

    needs: Sequence[Need]
    verdict: Future[Verdict]


class SharedAccount:
    """What one tenant uses, as this replica sees it. `owner` names its leases: those of the tenant's account under
    other limits, whose requests still run, are not its own."""

    def __init__(self, store: Sharing, tenant: str, limits: Sequence[Limit], *, owner: str) -> None:
        self.limits = tuple(limits)
        self.leases = [Lease(limit) for limit in limits]
        self.retired = False
        tag = quote(tenant, safe="")
        self._keys = [f"headrace:{{{tag}}}:{quote(limit.model, safe='')}:{limit.kind}" for limit in limits]
        self._store = store
        self._owner = owner
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
        if self._soon is None and (lease.tight(now) or self.retired):  # of a retired one no beat may tell any more
            self._soon = asyncio.get_running_loop().call_later(SOON_S, self._tell)

    def standing(self, index: int) -> Standing:
        return self.leases[index].standing(self._store.clock_us())

    def inherit(self, before: SharedAccount) -> None:
        """The store keeps what is used; for the time without it, what is known here is taken along."""
        now = self._store.clock_us()
        known = {(lease.limit.kind, lease.limit.model): lease.tally for lease in before.leases}
        for lease in self.leases:
            old = known.get((lease.limit.kind, lease.limit.model))
            if old is not None:
                lease.tally.set(converted(old.used(now), old.limit, lease.limit), now)

    def retire(self) -> None:
        self.retired = True

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
        arguments: list[str | int] = [self._owner, LEASE_US, 2 * store.replicas, len(batch)]
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
        except BaseException:  # the end, or a fault: nobody may wait for ever
            for waiting in batch:
                waiting.verdict.cancel()
            raise
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
