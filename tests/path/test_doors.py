"""Tenants that may have only so many connections open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from tests.faults.fakes import Fake, healthy
from tests.faults.process import pool
from tests.faults.rawclient import chat
from tests.path.house import House, Wire

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Tenant `few` may have two connections, `many` any number."""
    limits: dict[str, dict[str, Any]] = {"few": {"connections": 2}, "many": {}}
    tenants = {
        name: {"keys": [{"sha256": sha256(name.encode()).hexdigest()}], "limits": told} for name, told in limits.items()
    }
    async with Fake(healthy) as fake:
        config = pool(fake.url, tenants=tenants)
        config["security"] = {"secret": "env:HOME"}
        async with House(config, [fake]) as made:
            yield made


async def asked(house: House, wire: Wire, tenant: str) -> str:
    """What came of a request on a connection that stays open."""
    before = len(house.lines)
    wire.feed(chat(f"Authorization: Bearer {tenant}"))
    await house.eventually(lambda: len(house.lines) > before and wire.sent, "it is answered")
    outcome: str = house.lines[-1]["outcome"]
    return outcome


async def test_one_connection_too_many_is_refused_and_closed(house: House) -> None:
    """With a 429 that says why; the others are used on, and a place that is left can be taken."""
    first, second, third = (house.connect() for _ in range(3))
    assert [await asked(house, wire, "few") for wire in (first, second, first, second)] == ["ok"] * 4
    assert await asked(house, third, "few") == "connections_limit"
    response = third.response()
    assert (response.status, response.header("connection"), response.header("retry-after")) == (429, "close", "1")
    assert response.error()["code"] == "rate_limit_exceeded"
    await house.eventually(lambda: third.closed, "the connection is closed")
    assert house.gateway.doors.open == {"few": 2}
    first.leave()
    assert await asked(house, house.connect(), "few") == "ok"


async def test_who_has_no_limit_is_not_counted(house: House) -> None:
    """However many connections there are."""
    assert {await asked(house, house.connect(), "many") for _ in range(8)} == {"ok"}
    assert not house.gateway.doors.open


async def test_a_connection_is_its_last_users(house: House) -> None:
    """It changes hands with the key, to who has a limit and back."""
    wires = [house.connect() for _ in range(3)]
    assert [await asked(house, wire, "few") for wire in wires] == ["ok", "ok", "connections_limit"]
    assert await asked(house, wires[0], "many") == "ok"
    assert house.gateway.doors.open == {"few": 1}
    assert await asked(house, house.connect(), "few") == "ok"
    for wire in wires[:2]:
        wire.leave()
    assert house.gateway.doors.open == {"few": 1}


async def test_a_client_that_left_at_once_has_no_connection(house: House) -> None:
    """It is gone before its request is looked at: nobody would give its place back."""
    wire = house.connect()
    wire.feed(chat("Authorization: Bearer few"))
    wire.leave()
    await house.eventually(lambda: house.lines, "it is logged")
    assert not house.gateway.doors.open
