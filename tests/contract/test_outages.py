"""The store stops, dies, comes back with nothing, or is slow, while requests come: nobody waits for it, limits hold
within the share of each replica, and everything recovers by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import pytest

from gateway.sharedaccount import SharedAccount
from gateway.sharedstore import SharedStore
from gateway.stores import StoreAway
from policies.limits import Kind, Limit
from tests.contract.conftest import shared
from tests.contract.servers import Server, free_port, joined, serving
from tests.contract.servers import valkey as valkey_binary

pytestmark = pytest.mark.anyio

REPLICAS = 3
LONGEST_S = 0.2  # the promise is 0.1 s; a busy machine gets twice as much
SLACK = 20  # a third of the burst: what others spent of their leases since a replica last heard of the store
RATE = Limit(Kind.REQUESTS, 600, 60)
PLACES = Limit(Kind.CONCURRENT, 9)


@dataclass
class Load:
    """Requests for one tenant, open loop, in turn at each replica. `let` are the times of those let through."""

    accounts: list[SharedAccount]
    let: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    refused: int = 0
    failed: int = 0

    async def run(self, seconds: float, per_s: float) -> None:
        begun, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as tasks:
            while (elapsed := time.monotonic() - begun) < seconds:
                while number < elapsed * per_s:
                    tasks.create_task(self._ask(self.accounts[number % len(self.accounts)]))
                    number += 1
                await asyncio.sleep(0.005)

    async def _ask(self, account: SharedAccount) -> None:
        begun = time.monotonic()
        try:
            verdict = account.take([(0, RATE.cost(1)), (1, 1)])
            if isinstance(verdict, asyncio.Future):
                verdict = await verdict
        except StoreAway:
            self.failed += 1
            return
        finally:
            self.waits.append(time.monotonic() - begun)
        if verdict is None:
            self.let.append(begun)
            await asyncio.sleep(0.02)
            account.give(1, 1)
        else:
            self.refused += 1

    def holds(self, slack: int) -> None:
        """In no window more was let through than the limit, and `slack` requests."""
        for first in range(len(self.let)):
            for last in range(first, len(self.let), 5):
                most = RATE.burst + (self.let[last] - self.let[first]) * RATE.amount / 60
                assert last - first + 1 <= most + slack


@asynccontextmanager
async def loaded(server: Server, on_failure: str = "local_share") -> AsyncIterator[tuple[list[SharedStore], Load]]:
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(shared(server, on_failure=on_failure)) for _ in range(REPLICAS)]
        for store in stores * 2:
            await store._count()
        tenant = uuid4().hex
        yield stores, Load([store.account(tenant, [RATE, PLACES], None) for store in stores])


async def recovered(stores: list[SharedStore], within_s: float = 15) -> None:
    async with asyncio.timeout(within_s):
        while {store.mode for store in stores} != {"shared"}:
            await asyncio.sleep(0.02)


async def _killed(server: Server) -> None:
    server.kill()


async def _frozen(server: Server) -> None:
    server.freeze()


async def _started(server: Server) -> None:
    server.start()


async def _thawed(server: Server) -> None:
    server.thaw()


Act = Callable[[Server], Awaitable[None]]


@pytest.mark.parametrize(("away", "back"), [(_killed, _started), (_frozen, _thawed)], ids=["killed", "frozen"])
async def test_requests_go_on_without_the_store(valkey: Server, away: Act, back: Act) -> None:
    """At three times the limit: before, while it is away, and after."""
    async with loaded(valkey) as (stores, load):
        running = asyncio.create_task(load.run(6.0, 30.0))
        await asyncio.sleep(1.0)
        assert {store.mode for store in stores} == {"shared"}
        await away(valkey)
        await asyncio.sleep(2.0)
        modes = {store.mode for store in stores}
        await back(valkey)
        await recovered(stores)
        await running
        assert modes == {"local_share"}
        assert load.failed == 0
        assert max(load.waits) < LONGEST_S
        assert len(load.let) >= 0.85 * (RATE.burst + 6.0 * RATE.amount / 60)
        load.holds(SLACK)
        async with asyncio.timeout(20):  # and nothing is left behind of what ran meanwhile
            while any(account.active() for account in load.accounts):
                await asyncio.sleep(0.05)


async def test_a_store_that_comes_back_with_nothing_is_told(valkey: Server) -> None:
    """Restarted at once, under load: the burst is not there once more."""
    async with loaded(valkey) as (stores, load):
        running = asyncio.create_task(load.run(4.0, 40.0))
        await asyncio.sleep(2.0)
        valkey.kill()
        valkey.start()
        await running
        await recovered(stores)
        assert load.failed == 0
        assert max(load.waits) < LONGEST_S
        load.holds(SLACK)


@pytest.mark.parametrize("on_failure", ["deny", "allow"])
async def test_the_operator_chooses(valkey: Server, on_failure: str) -> None:
    """To serve nobody without the store, or everybody."""
    async with loaded(valkey, on_failure) as (stores, load):
        await load.run(0.5, 40.0)
        assert load.failed == 0
        valkey.freeze()
        try:
            before = len(load.let)
            await load.run(2.0, 100.0)
            assert {store.mode for store in stores} == {on_failure}
            assert max(load.waits) < LONGEST_S
            if on_failure == "deny":
                assert load.failed > 100
                assert len(load.let) - before < RATE.burst
            else:
                assert load.failed == 0
                assert len(load.let) - before == 200
        finally:
            valkey.thaw()
        await recovered(stores)


class Delay:
    """A way to the server on which everything takes its time."""

    def __init__(self, server: Server) -> None:
        self.port = free_port()
        self.delay_s = 0.0
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Delay:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _write(sink: asyncio.StreamWriter, data: bytes) -> None:
        if not sink.transport.is_closing():
            sink.write(data)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await source.read(65536):
                loop.call_later(self.delay_s / 2, self._write, sink, data)
        finally:
            sink.transport.abort()


async def test_a_slow_store_is_as_good_as_none(valkey: Server) -> None:
    """A second for each reply, and then none again."""
    async with Delay(valkey) as way, loaded(replace(valkey, port=way.port)) as (stores, load):
        running = asyncio.create_task(load.run(7.0, 30.0))
        await asyncio.sleep(1.0)
        way.delay_s = 1.0
        await asyncio.sleep(2.5)
        modes = {store.mode for store in stores}
        way.delay_s = 0.0
        await recovered(stores)
        await running
        assert modes == {"local_share"}
        assert load.failed == 0
        assert max(load.waits) < LONGEST_S
        load.holds(SLACK)
        assert sum(store.calls["slow"] for store in stores) < 40  # the breaker asks no more


async def test_a_call_out_of_time_is_not_made_again(valkey: Server) -> None:
    """It was carried out when the store went on: once."""
    async with shared(valkey) as store:
        account = store.account(uuid4().hex, [RATE], None)
        valkey.freeze()
        try:
            verdict = account.take([(0, RATE.cost(10))])
            assert isinstance(verdict, asyncio.Future)
            assert await verdict is None  # of the own share
        finally:
            valkey.thaw()
        await recovered([store])
        mark = int(await valkey.ask("HGET", account._keys[0], "t"))
        clock = await valkey.ask("TIME")
        used = mark - int(clock[0]) * 1_000_000 - int(clock[1])
        assert RATE.units(used) <= 20  # what it asked for then, and what was told of the own share since


async def test_requests_cancelled_around_a_slow_store_leave_nothing(valkey: Server) -> None:
    """A thousand of them, while the delay comes and goes."""
    async with Delay(valkey) as way, loaded(replace(valkey, port=way.port)) as (stores, load):

        async def ask(number: int) -> None:
            way.delay_s = 0.02 * (number // 100 % 3)
            account = load.accounts[number % REPLICAS]
            waiting = account.take([(0, RATE.cost(1)), (1, 1)])
            if isinstance(waiting, asyncio.Future):
                await asyncio.wait((waiting,), timeout=0.001 * (number % 30))
                if waiting.cancel():
                    return
                waiting = waiting.result()
            if waiting is None:
                account.give(0, RATE.cost(1))
                account.give(1, 1)

        for batch in range(0, 1000, 20):
            await asyncio.gather(*(ask(number) for number in range(batch, batch + 20)))
        way.delay_s = 0.0
        await recovered(stores)
        async with asyncio.timeout(20):
            while any(account.active() for account in load.accounts):
                await asyncio.sleep(0.05)
        own = load.accounts[0]
        verdicts = []
        for _ in range(PLACES.amount):
            verdict = own.take([(1, 1)])
            verdicts.append(await verdict if isinstance(verdict, asyncio.Future) else verdict)
        assert verdicts == [None] * PLACES.amount


async def test_a_cluster_that_fails_over_is_followed(tmp_path: Path) -> None:
    """One node of three dies, and its replica takes its place: tenants there have their share until then."""
    with ExitStack() as stack:
        nodes = []
        for number in range(4):
            (own := tmp_path / f"node{number}").mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "1000")
            nodes.append(stack.enter_context(serving(Server(valkey_binary(), own, options))))
        await joined(nodes[:3])
        await replicating(nodes[3], nodes[1])
        async with loaded(nodes[0]) as (stores, _):
            accounts = [store.account(f"tenant-{number}", [RATE], None) for number, store in enumerate(stores * 10)]

            async def all_served() -> bool:
                served = [account.take([(0, RATE.cost(1))]) for account in accounts]
                return [await each if isinstance(each, asyncio.Future) else each for each in served].count(None) == 30

            assert await all_served()
            nodes[1].kill()
            begun = time.monotonic()
            assert await all_served()
            assert time.monotonic() - begun < LONGEST_S
            await asyncio.sleep(0.5)
            assert {store.mode for store in stores} == {"local_share"}
            await recovered(stores, within_s=30)
            calls = sum(store.calls["down"] + store.calls["closed"] for store in stores)
            assert await all_served()
            assert sum(store.calls["down"] + store.calls["closed"] for store in stores) == calls


async def replicating(node: Server, master: Server) -> None:
    """`node` becomes the replica of `master`."""
    bus = node.options[node.options.index("--cluster-port") + 1]
    await master.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    name = await master.ask("CLUSTER", "MYID")
    async with asyncio.timeout(30):
        while name not in await node.ask("CLUSTER", "NODES"):
            await asyncio.sleep(0.05)
        await node.ask("CLUSTER", "REPLICATE", name)
        while b"master_link_status:up" not in await node.ask("INFO", "replication"):
            await asyncio.sleep(0.05)
