"""Emulated backends and a gateway before them, as processes, for all tests of a client library."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.processes import running

KEY = "hr-key-of-the-client-tests"
TURNS = [{"role": "user", "content": "How does the water reach the turbine?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
IN_FLIGHT, QUEUED = "headrace_in_flight_requests", "headrace_queued_requests"


@dataclass(frozen=True)
class Service:
    """A gateway process. `api` is its URL without a path."""

    api: str
    admin: str
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        """The request log."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def line(self, request_id: str | None) -> dict[str, Any]:
        """What the log says of one request, once it says it."""
        return self.eventually(lambda: next((x for x in self.lines() if x["request_id"] == request_id), None))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that carry these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.admin}/metrics").text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def eventually(self, look: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """What `look` finds, as soon as it finds anything."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.02)
        return found

    def settled(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.metric(IN_FLIGHT) == self.metric(QUEUED) == 0


def started(stack: ExitStack, folder: Path, told: dict[str, Any]) -> Service:
    """A gateway with this configuration, on free ports, as long as the stack stands."""
    path = folder / "headrace.yaml"
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    path.write_text(json.dumps({"server": server} | told))  # JSON is YAML
    log = folder / "headrace.log"
    urls = stack.enter_context(running("gateway.cli", ["serve", "-c", str(path), "--json"], log))
    return Service(urls["api"], urls["admin"], log)


def tenant(key: str, **told: Any) -> dict[str, Any]:
    """The configuration of one that has this key."""
    return {"keys": [{"sha256": sha256(key.encode()).hexdigest()}], **told}


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two emulators behind a gateway with one tenant. `m` has an alias, `org/name:8b` another name there, and
    `hidden` is not the tenant's to see."""
    folder = tmp_path_factory.mktemp("service")
    with ExitStack() as stack:
        urls = []
        for number in (1, 2):
            arguments = ["emulate", "--port=0", "--speed=20", "--json"]
            urls.append(stack.enter_context(running("gateway.cli", arguments, folder / f"{number}.log"))["url"])
        told: dict[str, Any] = {
            "pools": {"p": {"engine": "vllm", "backends": [{"url": url} for url in urls]}},
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
