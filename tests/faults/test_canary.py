"""A new version of a model for a part of the callers, and how it compares."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.faults.fakes import Fake, FakeConnection, healthy
from tests.faults.process import TOKEN, GatewayProcess, pool
from tests.faults.rawclient import ask, chat
from tests.service import run

pytestmark = pytest.mark.anyio
TENANTS = 24
ADMIN = {"admin_token": "env:ADMIN_TOKEN"}


@pytest.fixture
async def old() -> AsyncIterator[Fake]:
    async with Fake(healthy) as fake:
        yield fake


@pytest.fixture
async def new() -> AsyncIterator[Fake]:
    async with Fake(healthy) as fake:
        yield fake


async def broken(connection: FakeConnection) -> None:
    """Closes in the middle of every stream."""
    await connection.request()
    await connection.stream_head()
    await connection.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    connection.fin()


def two_pools(old: Fake, new: Fake, **canary: Any) -> dict[str, Any]:
    """Model `m` in pool `p`, and its new version in `q`; some tenants, one key each."""
    told = {"pool": "q", "weight": "50%"} | canary
    tenants = {name: {"keys": [{"sha256": sha256(f"key-{name}".encode()).hexdigest()}]} for name in names()}
    config = pool(old.url, models={"m": {"pool": "p", "canary": told}}, tenants=tenants, server=ADMIN)
    config["pools"]["q"] = pool(new.url)["pools"]["p"]
    return config | {"security": {"secret": "env:SECRET"}}


def names() -> list[str]:
    return [f"t{number}" for number in range(TENANTS)]


def gateway(config: dict[str, Any], folder: Path) -> GatewayProcess:
    return GatewayProcess(config, folder, {"SECRET": "a-secret-of-the-tests"})


def key(tenant: str) -> str:
    return f"Authorization: Bearer key-{tenant}"


async def takers(gateway: GatewayProcess, fake: Fake) -> set[str]:
    """The tenants whose requests reach a backend."""
    found = set()
    for name in names():
        before = fake.hits
        assert (await ask(gateway.port, chat(key(name)))).status == 200
        if fake.hits > before:
            found.add(name)
    return found


async def test_a_tenant_stays_with_its_version_and_a_growing_weight_takes_nobody_out(
    old: Fake, new: Fake, tmp_path: Path
) -> None:
    """About as many as the weight says; the same ones again, after a reload too; 100 % are all."""
    async with gateway(two_pools(old, new), tmp_path) as of:
        first = await takers(of, new)
        assert 4 <= len(first) <= 20
        assert await takers(of, new) == first
        assert (await of.reloaded(two_pools(old, new, weight="75%")))["result"] == "applied"
        assert await takers(of, new) > first
        await of.reloaded(two_pools(old, new, weight="100%"))
        assert await takers(of, new) == set(names())
        await of.idle([old, new])


async def test_conversations_of_one_tenant_fall_apart_but_none_changes_sides(
    old: Fake, new: Fake, tmp_path: Path
) -> None:
    """Each goes by its first user message, whatever the system prompt says before it or the turns after it."""
    async with gateway(two_pools(old, new, sticky="conversation"), tmp_path) as of:
        sides = []
        for number in range(16):
            talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"question {number}"}]
            went = []
            for _ in range(3):
                before = new.hits
                assert (await ask(of.port, chat(key("t0"), messages=talk))).status == 200
                went.append(new.hits > before)
                talk += [{"role": "assistant", "content": "So."}, {"role": "user", "content": f"more {len(talk)}"}]
            assert len(set(went)) == 1
            sides.append(went[0])
        assert len(set(sides)) == 2


async def test_a_new_version_that_is_down_costs_nobody_an_answer(old: Fake, new: Fake, tmp_path: Path) -> None:
    """The old pool stands in for it; the failures are the canary's and the answers the stable version's."""
    await new.stop()
    async with gateway(two_pools(old, new, weight="100%"), tmp_path) as of:
        answers = [await ask(of.port, chat(key(name))) for name in names()[:5]]
        assert {answer.status for answer in answers} == {200}
        assert await of.metric("headrace_version_attempts_total", version="canary", outcome="upstream_error") == 5
        assert await of.metric("headrace_version_attempts_total", version="stable", outcome="ok") == 5


async def test_some_backends_of_a_pool_can_be_the_new_version(old: Fake, new: Fake, tmp_path: Path) -> None:
    """Each side keeps to its own, and has the other's when its own are gone."""
    told = {"backends": [new.url], "weight": "50%"}
    config = two_pools(old, new)
    config["models"]["m"]["canary"] = told
    config["pools"] = pool(old.url, new.url, routing="round_robin")["pools"]
    async with gateway(config, tmp_path) as of:
        first = await takers(of, new)
        assert 4 <= len(first) <= 20
        assert await takers(of, new) == first
        assert await of.metric("headrace_version_attempts_total", version="canary") == 2 * len(first)
        await new.stop()
        assert await takers(of, old) == set(names())


async def test_status_compares_the_versions(old: Fake, new: Fake, tmp_path: Path) -> None:
    """A version that breaks its streams is found worse, one that is alike is not; a client that left is in neither."""
    async with gateway(two_pools(old, new), tmp_path) as of:
        config = [f"--admin=http://127.0.0.1:{of.admin_port}"]
        environ = {"HEADRACE_ADMIN_TOKEN": TOKEN}
        for _ in range(2):
            for name in names():
                await ask(of.port, chat(key(name), stream=True))
        alike = (await of.admin("/admin/canary")).json()["canaries"][0]
        assert alike["difference"]["failed"]["verdict"] == "no difference seen"
        assert {side["attempts"] > 0 for side in alike["versions"].values()} == {True}
        assert sum(side["attempts"] for side in alike["versions"].values()) == 2 * TENANTS
        assert alike["ratio"]["ttft"]["low"] < alike["ratio"]["ttft"]["estimate"] < alike["ratio"]["ttft"]["high"]
        await new.play(broken)
        for _ in range(2):
            for name in names():
                await ask(of.port, chat(key(name), stream=True))
        told = await anyio.to_thread.run_sync(lambda: run("canary", "status", *config, "--json", **environ))
        found = json.loads(told.stdout)["canaries"][0]
        assert found["difference"]["failed"]["verdict"] == "worse"
        assert found["difference"]["failed"]["estimate"] == pytest.approx(0.5)
        assert found["difference"]["failed"]["low"] > 0.1
        shown = await anyio.to_thread.run_sync(lambda: run("canary", "status", *config, **environ))
        assert "m: pool q for 50.00% of the tenants" in shown.stdout
        assert "worse" in shown.stdout
        assert await of.metric("headrace_version_ttft_seconds_count") == 4 * TENANTS
        await of.reloaded(two_pools(old, new, weight="60%"))
        fresh = (await of.admin("/admin/canary")).json()["canaries"][0]
        assert fresh["versions"]["stable"]["attempts"] == 0


async def test_a_tenant_of_a_region_is_no_ones_canary_elsewhere(old: Fake, new: Fake, tmp_path: Path) -> None:
    """The new version stands in another region: an `eu` tenant has the old one."""
    config = two_pools(old, new, weight="100%")
    for name, region in (("p", "eu"), ("q", "us")):
        config["pools"][name]["backends"][0]["region"] = region
    config["tenants"]["t0"]["residency"] = ["eu"]
    async with gateway(config, tmp_path) as of:
        assert (await ask(of.port, chat(key("t0")))).status == 200
        assert (await ask(of.port, chat(key("t1")))).status == 200
        assert (old.hits, new.hits) == (1, 1)
