"""One gateway and one backend for all tests of a module: starting a process costs more than most tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.fakes import Fake, Script, healthy
from tests.faults.process import GatewayProcess, pool


@dataclass
class Stage:
    """What a test plays on. It is swept before each: the backend has forgotten, logs and counters start anew."""

    fake: Fake
    gateway: GatewayProcess

    @property
    def port(self) -> int:
        return self.gateway.port

    def play(self, script: Script) -> None:
        """What the backend does from the next connection on."""
        self.fake.script = script

    async def settled(self, **tolerance: int) -> None:
        """The invariants that hold after every test."""
        await self.gateway.settled([self.fake], **tolerance)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As for all tests, for the module: what it shares lives on one event loop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """What the gateway of a module has configured otherwise than `pool` does."""
    return {}


@pytest.fixture(scope="module")
async def shared(
    anyio_backend: object, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    """The stage of a module."""
    folder = tmp_path_factory.mktemp("gateway")
    async with Fake(healthy) as fake, GatewayProcess(pool(fake.url, **settings), folder) as gateway:
        yield Stage(fake, gateway)


@pytest.fixture
async def stage(shared: Stage) -> Stage:
    """The module's stage, swept."""
    await shared.fake.forget()
    shared.play(healthy)
    await shared.gateway.mark()
    return shared
