"""One gateway for all tests of a client library, and what they ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.service import Service, emulating, started, tenant

KEY = "hr-key-of-the-client-tests"
TURNS = [{"role": "user", "content": "How does the water reach the turbine?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two emulators behind a gateway with one tenant. `m` has an alias, `org/name:8b` another name there, and
    `hidden` is not the tenant's to see."""
    folder = tmp_path_factory.mktemp("service")
    with ExitStack() as stack:
        urls = [emulating(stack, folder, "--speed=20") for _ in range(2)]
        told: dict[str, Any] = {
            "pools": {"p": {"engine": "vllm", "backends": [{"url": url} for url in urls], "health": {"eject": False}}},
            "models": {"m": {"aliases": ["gpt-4o"]}, "org/name:8b": {"upstream_name": "m"}, "hidden": {}},
            "tenants": {"app": tenant(KEY, models=["m", "org/*"])},
        }
        yield started(stack, folder, told)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test of the service nothing runs on it, and its log tells of no fault in itself."""
    yield
    if "service" in request.fixturenames:
        service: Service = request.getfixturevalue("service")
        service.eventually(service.settled)
        log = service.log.read_text()
        assert "Traceback" not in log, log[-4000:]
        assert KEY not in log
