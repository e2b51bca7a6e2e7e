"""One gateway for all tests of a file that need no settings of their own, before two backends with scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.fakes import Fake, healthy
from tests.faults.process import GatewayProcess, pool


@dataclass(frozen=True)
class Stage:
    """A gateway and its backends."""

    gateway: GatewayProcess
    a: Fake
    b: Fake


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The tests of a file share a loop, and with it a gateway."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """What the gateway of a file has configured besides its pools and models."""
    return {}


@pytest.fixture(scope="module")
async def shared_stage(
    anyio_backend: tuple[str, dict[str, bool]], settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with Fake(healthy) as a, Fake(healthy) as b:
        config = pool(a.url, models={"m": {"pool": "p"}, "one": {"pool": "one"}, "two": {"pool": "two"}})
        config["pools"]["one"] = pool(a.url, concurrency=1)["pools"]["p"]
        config["pools"]["two"] = pool(a.url, b.url, routing="round_robin")["pools"]["p"]
        config |= settings | {"models": config["models"] | settings.get("models", {})}
        async with GatewayProcess(config, tmp_path_factory.mktemp("gateway")) as gateway:
            yield Stage(gateway, a, b)


@pytest.fixture
async def stage(shared_stage: Stage) -> Stage:
    """As new."""
    await shared_stage.a.play(healthy)
    await shared_stage.b.play(healthy)
    await shared_stage.gateway.begin()
    return shared_stage


@pytest.fixture
def gateway(stage: Stage) -> GatewayProcess:
    """The gateway: model `m` is served by backend `a`, `one` too but one request at a time, `two` by `a` and `b` in
    turn."""
    return stage.gateway


@pytest.fixture
def a(stage: Stage) -> Fake:
    """The backend of all models."""
    return stage.a


@pytest.fixture
def b(stage: Stage) -> Fake:
    """The second backend of model `two`."""
    return stage.b
