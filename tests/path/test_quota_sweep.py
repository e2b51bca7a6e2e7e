"""A request under limits that is cancelled, or whose client leaves, at its n-th await: its place is free again, and of
its tenant's rates exactly what it used is used. In memory, and with a store that replicas share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.contract.servers import Server, started
from tests.faults.fakes import Fake, healthy
from tests.faults.process import DIGEST, KEY, pool
from tests.faults.rawclient import chat
from tests.path.house import AtAwait, House, Wire

pytestmark = pytest.mark.anyio

MOST_AWAITS = 40
REQUEST = chat(f"Authorization: Bearer {KEY}", stream=True, max_tokens=50)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.mark.parametrize("how", ["cancelled", "cancelled late", "left", "left late"])
@pytest.mark.parametrize("where", ["memory", "valkey"])
async def test_a_request_that_ends_at_its_nth_await_gives_back_what_it_held(
    valkey: Server, where: str, how: str
) -> None:
    """Exactly once, whatever it waited for: the store, a connection, or the backend."""
    limits = {"requests_per_minute": 600, "tokens_per_minute": 100_000, "concurrent": 1}
    async with Fake(healthy) as fake:
        config = pool(fake.url, tenants={"t": {"keys": [{"sha256": DIGEST}], "limits": limits}})
        if where == "valkey":
            config["state"] = {"url": valkey.url}
        for n in range(1, MOST_AWAITS):
            await valkey.ask("FLUSHALL")
            async with House(config, [fake]) as house:
                fired = await interrupted(house, n, how)
            assert house.faults == []
            if not fired:
                break
        assert (3 if where == "valkey" else 2) < n < MOST_AWAITS - 1


async def interrupted(house: House, n: int, how: str) -> bool:
    """One request that ends at its n-th await; False if it completed before."""
    wire = house.connect()
    drive: AtAwait | None = None

    def around(coroutine: Any) -> AtAwait:
        nonlocal drive
        drive = AtAwait(coroutine, n, partial(end, wire, asyncio.current_task(), how), late=how.endswith("late"))
        return drive

    house.around = around
    wire.feed(REQUEST)
    await house.eventually(lambda: house.lines and not house.remains(), "it has ended")
    assert drive is not None
    await house.eventually(lambda: used(house)["concurrent"] == 0, "its place is free")
    requests = used(house)["requests"]
    assert requests in (0, 1)
    await house.eventually(lambda: used(house)["tokens"] <= 100 * requests, "its tokens are settled")
    wire.leave()
    assert (await house.ask(REQUEST)).status == 200  # the only place is usable again
    return drive.awaits >= n


def end(wire: Wire, task: Any, how: str) -> None:
    if how.startswith("cancelled"):
        task.cancel()
    else:
        wire.leave()


def used(house: House) -> dict[str, int]:
    return {str(each.limit.kind): each.used for each in house.gateway.quota.usage()["t"]}
