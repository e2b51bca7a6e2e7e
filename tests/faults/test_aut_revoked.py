"""Keys and tokens that are taken away, or are about to be. Cases of the public collection by their id."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy
from tests.faults.process import DIGEST, KEY, TOKEN, GatewayProcess, pool
from tests.faults.rawclient import RawClient, ask, chat
from tests.faults.test_aut import BEARER, OTHER, digest, refused

pytestmark = pytest.mark.anyio

BOUND_S = 5.0  # documented: a file is looked at twice a second, and taken at the second look


def telling(url: str, *digests: str, **more: Any) -> dict[str, Any]:
    """One tenant with these keys."""
    keys = [{"sha256": each} for each in digests]
    return pool(url, tenants={"t": {"keys": keys, **more}}, server={"admin_token": "env:ADMIN_TOKEN"})


class Gate:
    """A backend whose streams begin at once and end when it is let; whole answers come at once."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def script(self, connection: FakeConnection) -> None:
        while True:
            request = await connection.request()
            if not request.json().get("stream"):
                await connection.answer(b"{}")
                continue
            await connection.stream_head()
            await connection.chunk(event("t0"))
            await self.open.wait()
            await connection.chunk(event(finish="stop") + DONE)
            await connection.last_chunk()


async def test_b108_a_revoked_key_is_refused_by_all_replicas(tmp_path: Path) -> None:
    """Two replicas that have just served it refuse it within the documented bound of the file's change. A stream that
    was begun with it goes on to its end; the tenant's other key is good without a break."""
    gate = Gate()
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(Fake(gate.script))
        told = telling(fake.url, DIGEST, digest(OTHER))
        first = await stack.enter_async_context(GatewayProcess(told, tmp_path))
        (tmp_path / "second").mkdir()
        second = GatewayProcess(told, tmp_path / "second")
        second.path = first.path
        await stack.enter_async_context(second)
        replicas = [first, second]
        streams = [await stack.enter_async_context(RawClient(each.port)) for each in replicas]
        for each, client in zip(replicas, streams, strict=True):
            assert (await ask(each.port, chat(BEARER))).status == 200
            await client.send(chat(BEARER, stream=True))
        begun = [await client.response(until=b"t0") for client in streams]
        first.write(telling(fake.url, digest(OTHER)))
        changed = time.monotonic()
        for each in replicas:
            while (await ask(each.port, chat(BEARER))).status != 401:
                assert time.monotonic() - changed < BOUND_S
                assert (await ask(each.port, chat(f"Authorization: Bearer {OTHER}"))).status == 200
                await asyncio.sleep(0.05)
            refused(await ask(each.port, chat(BEARER)))
            assert (await ask(each.port, chat(f"Authorization: Bearer {OTHER}"))).status == 200
        gate.open.set()
        for response, client in zip(begun, streams, strict=True):
            await client.read(response)
            assert response.complete and response.body.endswith(DONE)


async def test_b108_the_admin_token_takes_the_same_path(tmp_path: Path) -> None:
    """Its file changes: the old token is refused within the bound, and the new one is good."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with Fake(healthy) as fake:
        config = pool(fake.url, server={"admin_token": f"file:{token}"})
        async with GatewayProcess(config, tmp_path) as gateway:
            assert (await gateway.admin("/admin/config")).status_code == 200
            token.write_text("another-token-of-the-tests")
            gateway.secrets.append("another-token-of-the-tests")
            changed = time.monotonic()
            while (answer := await gateway.admin("/admin/config")).status_code != 401:
                assert time.monotonic() - changed < BOUND_S
                await asyncio.sleep(0.05)
            assert TOKEN not in answer.text
            assert (await gateway.admin("/admin/config", token="another-token-of-the-tests")).status_code == 200
            await gateway.settled([fake])


async def test_b103_b104_a_revoked_key_is_refused_like_any_other(tmp_path: Path) -> None:
    """The same answer as for a key that never was, and no part of it anywhere."""
    async with Fake(healthy) as fake, GatewayProcess(telling(fake.url, DIGEST, digest(OTHER)), tmp_path) as gateway:
        gateway.secrets.append(OTHER)
        assert (await ask(gateway.port, chat(f"Authorization: Bearer {OTHER}"))).status == 200
        assert (await gateway.reloaded(telling(fake.url, DIGEST)))["result"] == "applied"
        revoked = await ask(gateway.port, chat(f"Authorization: Bearer {OTHER}"))
        unknown = await ask(gateway.port, chat("Authorization: Bearer hr-unknown"))
        refused(revoked)
        assert revoked.body == unknown.body
        names = [[name for name, _ in response.headers] for response in (revoked, unknown)]
        assert names[0] == names[1]
        seen = gateway.log + (await gateway.get("/metrics")).text + repr(revoked)
        for start in range(3, len(OTHER) - 8):
            assert OTHER[start : start + 8] not in seen
        await gateway.settled([fake], sent=3)


async def test_keys_overlap_while_they_are_replaced(tmp_path: Path) -> None:
    """The old key gets an end and the new one stands beside it: both are good until then, by the clock and without
    another reload; the admin API says which is still used."""
    async with Fake(healthy) as fake:
        config = telling(fake.url, digest(OTHER), DIGEST)
        old, new = config["tenants"]["t"]["keys"]
        old["id"], new["id"] = "old", "new"
        async with GatewayProcess(config, tmp_path) as gateway:
            ends = datetime.now(UTC) + timedelta(seconds=3)
            old["expires"] = ends.isoformat()
            assert (await gateway.reloaded(config))["result"] == "applied"
            assert [(await ask(gateway.port, chat(f"x-api-key: {key}"))).status for key in (KEY, OTHER)] == [200, 200]
            (tenant,) = (await gateway.admin("/admin/tenants")).json()["tenants"]
            assert [(key["id"], key["state"], bool(key["last_used"])) for key in tenant["keys"]] == [
                ("old", "good", True),
                ("new", "good", True),
            ]
            while (response := await ask(gateway.port, chat(f"x-api-key: {OTHER}"))).status == 200:
                assert datetime.now(UTC) < ends + timedelta(seconds=2)
                await asyncio.sleep(0.1)
            assert datetime.now(UTC) >= ends
            refused(response)
            assert (await ask(gateway.port, chat(BEARER))).status == 200
            (tenant,) = (await gateway.admin("/admin/tenants")).json()["tenants"]
            assert [key["state"] for key in tenant["keys"]] == ["expired", "good"]
            await gateway.settled([fake])


GUARDED = [
    ("GET", "/admin/tenants"),
    ("GET", "/admin/usage"),
    ("GET", "/admin/config"),
    ("POST", "/admin/reload"),
    ("POST", "/admin/explain"),
]


async def test_the_admin_api_asks_for_its_token(tmp_path: Path) -> None:
    """Missing, wrong, a client's key, another scheme: 401, and nothing is done. Health and metrics need none."""
    async with Fake(healthy) as fake, GatewayProcess(telling(fake.url, DIGEST), tmp_path) as gateway:
        gateway.path.write_text("nothing good")
        for method, path in GUARDED:
            for token in ("", "wrong", KEY, TOKEN[:-1], TOKEN + "x", "ü"):
                headers = {"authorization": f"Bearer {token}".strip().encode()}
                answer = await gateway.asked(method, path, headers)
                assert answer.status_code == 401, (path, token)
                assert answer.headers["www-authenticate"] == "Bearer"
            basic = await gateway.asked(method, path, {"authorization": f"Basic {TOKEN}".encode()})
            assert basic.status_code == 401
        for path in ("/healthz", "/livez", "/readyz", "/metrics"):
            assert (await gateway.get(path)).status_code == 200
        assert await gateway.metric("headrace_config_generation") == 1
        await gateway.settled([fake])


async def test_without_a_token_nobody_may_more_than_look_at_health(tmp_path: Path) -> None:
    """Not on loopback either: 403, for every route and whatever is sent."""
    async with Fake(healthy) as fake, GatewayProcess(pool(fake.url), tmp_path) as gateway:
        for method, path in GUARDED:
            for headers in ({}, {"authorization": b"Bearer"}, {"authorization": b"Bearer None"}):
                assert (await gateway.asked(method, path, headers)).status_code == 403, path
        await gateway.settled([fake])
