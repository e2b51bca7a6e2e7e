"""What a gateway does that is too busy to do everything."""

from __future__ import annotations

import json

import pytest

from gateway.config import parse
from tests.faults.fakes import Fake, healthy
from tests.faults.process import pool
from tests.faults.rawclient import chat
from tests.path.house import House

pytestmark = pytest.mark.anyio

BATCH = "X-Headrace-Class: batch"


async def test_an_event_loop_that_is_late_refuses_batch_work_first() -> None:
    """Who waits for an answer is served; the rest is told to come again, until the strain is over."""
    async with Fake(healthy) as fake, House(pool(fake.url), [fake]) as house:
        assert house.gateway.vitals.on_strain is not None
        house.gateway.vitals.on_strain(True)
        refused = await house.ask(chat(BATCH))
        assert (refused.status, refused.error()["code"]) == (503, "server_is_overloaded")
        assert (refused.header("x-headrace-reason"), refused.header("retry-after")) == ("gateway_busy", "2")
        assert (await house.ask(chat())).status == 200
        assert fake.hits == 1
        house.gateway.vitals.on_strain(False)
        assert (await house.ask(chat(BATCH))).status == 200


async def test_classes_that_change_while_it_is_late_are_those_that_count() -> None:
    """Work that has become urgent is served at once, and what is so no more is refused."""
    async with Fake(healthy) as fake:
        config = pool(fake.url, classes={"interactive": {}, "batch": {"ceiling": "70%"}})
        async with House(config, [fake]) as house:
            assert house.gateway.vitals.on_strain is not None
            house.gateway.vitals.on_strain(True)
            assert (await house.ask(chat(BATCH))).status == 503
            config["classes"] = {"interactive": {"ceiling": "70%"}, "batch": {"ceiling": "100%"}}
            house.gateway.apply(parse(json.dumps(config)))
            assert (await house.ask(chat(BATCH))).status == 200
            assert (await house.ask(chat())).status == 503
