"""Gateways and emulated backends as processes, for tests that are no coroutines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.processes import running

IN_FLIGHT, QUEUED = "headrace_in_flight_requests", "headrace_queued_requests"


@dataclass(frozen=True)
class Service:
    """A gateway process. `api` is its URL without a path."""

    process: subprocess.Popen[bytes]
    api: str
    admin: str
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        """The request log."""
        return [
            json.loads(line)
            for line in self.log.read_text().splitlines()
            if line.startswith('{"time"') and '"event":"request"' in line
        ]

    def line(self, request_id: str | None) -> dict[str, Any]:
        """What the log says of one request, once it says it."""
        return self.eventually(lambda: next((x for x in self.lines() if x["request_id"] == request_id), None))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that carry these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.admin}/metrics").text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def eventually(self, look: Callable[[], Any], timeout_s: float = 20.0, every_s: float = 0.02) -> Any:
        """What `look` finds, as soon as it finds anything."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(every_s)
        return found

    def settled(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.metric(IN_FLIGHT) == self.metric(QUEUED) == 0


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`headrace` with these arguments, when it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
    )


def started(stack: ExitStack, folder: Path, told: dict[str, Any], *arguments: str, **files: str) -> Service:
    """A gateway with this configuration and the files beside it, on free ports unless it says otherwise."""
    path = folder / "headrace.yaml"
    for name, text in files.items():
        (folder / name).write_text(text)
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"} | told.get("server", {})
    path.write_text(json.dumps(told | {"server": server}))  # JSON is YAML
    return serving(stack, folder, "-c", str(path), *arguments)


def serving(stack: ExitStack, folder: Path, *arguments: str) -> Service:
    """`headrace serve` with these arguments, as long as the stack stands."""
    log = folder / "headrace.log"
    up = stack.enter_context(running("gateway.cli", ["serve", "--json", *arguments], log))
    return Service(up.process, up.announced["api"], up.announced["admin"], log)


def emulating(stack: ExitStack, folder: Path, *arguments: str) -> str:
    """The URL of `headrace emulate` with these arguments, on a free port."""
    log = folder / f"emulator-{uuid4().hex}.log"
    up = stack.enter_context(running("gateway.cli", ["emulate", "--port=0", "--json", *arguments], log))
    return str(up.announced["url"])


def tenant(key: str, **told: Any) -> dict[str, Any]:
    """The configuration of one that has this key."""
    return {"keys": [{"sha256": sha256(key.encode()).hexdigest()}], **told}
