"""Every store that limits may be counted in."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest

from gateway.sharedstore import SharedStore
from gateway.stores import MemoryStore, Store
from tests.contract.servers import Server, started

SHARED = ["valkey", "valkey cluster", "redis 7", "redis 7 with TLS", "redis 6.2"]
Opening = Callable[[], Awaitable[Store]]


def clock_us() -> int:
    return int(time.monotonic() * 1e6)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=SHARED)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each kind of server, once for a file."""
    with started(request.param, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="module", params=["memory", *SHARED])
def maybe_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | None]:
    """The same, and None for memory."""
    if request.param == "memory":
        yield None
        return
    with started(request.param, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server that tests may mistreat."""
    with started("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


def shared(server: Server, **told: object) -> SharedStore:
    """A replica's store on a server."""
    return SharedStore(server.url, told.get("on_failure", "local_share"), clock_us, replica=uuid4().hex[:8])  # type: ignore[arg-type]


@pytest.fixture
async def opened(maybe_server: Server | None) -> AsyncIterator[Opening]:
    """Opens stores, each as a replica of its own would."""
    async with AsyncExitStack() as stack:

        async def open_one() -> Store:
            store: Store = MemoryStore(clock_us) if maybe_server is None else shared(maybe_server)
            await stack.enter_async_context(store)
            return store

        yield open_one
