"""A real gateway process, and the invariants that must hold after whatever a test did to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

KEY = "hr-test-key-of-the-tests"
DIGEST = "acad01ef4387d57e7610cc14084d6ff0170b4145469eaf3abbbabc36c9b6c5b3"
BAD_WORDS = ("Traceback", "never retrieved", "Failed to detach", "was never awaited", "Task was destroyed")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class GatewayProcess:
    """`async with GatewayProcess(config, folder) as gateway`: one `headrace serve` with free ports."""

    def __init__(self, config: dict[str, Any], folder: Path, environ: dict[str, str] | None = None) -> None:
        self.config = {"server": {}, "telemetry": {}} | config
        self.config["server"] = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"} | self.config["server"]
        self.path = folder / "headrace.yaml"
        self.log_path = folder / "headrace.log"
        self.secrets: list[str] = []
        self.port = self.admin_port = 0
        self.sent = 0
        self._environ = os.environ | (environ or {})
        self._process: asyncio.subprocess.Process | None = None
        self._fds = 0
        self._log_from = 0
        self._before: Samples = {}

    async def __aenter__(self) -> GatewayProcess:
        self.path.write_text(json.dumps(self.config))  # JSON is YAML
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.cli", "serve", "-c", str(self.path), stderr=log, env=self._environ
            )
        await self.eventually(lambda: "headrace serves" in self.log, "the gateway is up", timeout_s=20)
        found = re.search(r"serves https?://\S+:(\d+)/v1 .*:(\d+)\)", self.log)
        assert found, self.log
        self.port, self.admin_port = int(found[1]), int(found[2])
        await self.get("/metrics")
        self._fds = self.fds
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        process = self._process
        assert process is not None
        if process.returncode is None:
            if kind is None:
                process.send_signal(signal.SIGCONT)
            process.kill()
            await process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What was logged since the last mark."""
        return self.log_path.read_bytes()[self._log_from :].decode(errors="replace")

    async def mark(self) -> None:
        """A new test begins: logs and counters of those before are not its own."""
        await asyncio.sleep(0.06)  # the writer gathers lines for 50 ms
        self._before = {}
        self._before = {key: value for key, value in (await self.samples()).items() if key[0].endswith(COUNTERS)}
        self._log_from = self.log_path.stat().st_size

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The request log."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    @property
    def fds(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    @property
    def rss(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Processor seconds used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self, timeout_s: float) -> int:
        """The exit code."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    async def get(self, path: str) -> httpx.Response:
        """From the admin port."""
        async with httpx.AsyncClient(verify=False) as client:  # loading certificates takes longer than the request
            return await client.get(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10)

    async def samples(self) -> Samples:
        """All samples of /metrics, which must parse; what counts up counts from the last mark."""
        text = (await self.get("/metrics")).text
        families = text_string_to_metric_families(text)
        found = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
        return {key: value - self._before.get(key, 0) for key, value in found.items()}

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of one name that carry these labels."""
        wanted = set(labels.items())
        return sum(value for (key, found), value in (await self.samples()).items() if key == name and wanted <= found)

    async def outcomes(self) -> dict[str, int]:
        """Requests by outcome."""
        counts: dict[str, int] = {}
        for (name, labels), value in (await self.samples()).items():
            if name == "headrace_requests_total" and value:
                outcome = dict(labels)["outcome"]
                counts[outcome] = counts.get(outcome, 0) + int(value)
        return counts

    async def eventually(
        self, condition: Callable[[], object] | Callable[[], Awaitable[object]], what: str, timeout_s: float = 5.0
    ) -> None:
        """Poll until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            result = condition()
            if await result if isinstance(result, Awaitable) else result:
                return
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.log[-2000:]}"
            await asyncio.sleep(0.02)

    async def settled(self, fakes: Sequence[Any] = (), *, fds: int = 5) -> None:
        """The invariants: nothing in flight, nothing queued, nothing open at the backends, descriptors as before, no
        fault in the log, no secret anywhere."""

        async def still() -> bool:
            gauges = {key: value for key, value in (await self.samples()).items() if key[0] in GAUGES}
            assert all(value >= 0 for value in gauges.values()), gauges
            return not any(gauges.values()) and not any(fake.open_requests for fake in fakes)

        await self.eventually(still, "gauges and backends idle")
        idle = sum(len(fake.tasks) for fake in fakes)
        await self.eventually(lambda: self.fds <= self._fds + idle + fds, "descriptors at the baseline", timeout_s=8)
        begun = time.monotonic()
        assert (await self.get("/livez")).status_code == 200
        assert time.monotonic() - begun < 0.5
        metrics = (await self.get("/metrics")).text
        for word in BAD_WORDS:
            assert word not in self.log, self.log[-4000:]
        for secret in (KEY, *self.secrets):
            assert secret not in self.log
            assert secret not in metrics


COUNTERS = ("_total", "_bucket", "_count", "_sum")
GAUGES = ("headrace_in_flight_requests", "headrace_queued_requests")


def pool(*urls: str, engine: str = "vllm", **settings: Any) -> dict[str, Any]:
    """A configuration with one pool, one model `m`, fast clocks, and no tenants unless given."""
    clocks = {"connect": "1s", "headers": "2s", "first_token": "2s", "idle": "3s", "total": "60s"}
    backends = [{"url": url, "concurrency": settings.pop("concurrency", 64)} for url in urls]
    config: dict[str, Any] = {
        "pools": {"p": {"engine": engine, "backends": backends, "timeouts": clocks | settings.pop("timeouts", {})}},
        "models": {"m": {"pool": "p"}},
    }
    for key in ("server", "models", "tenants", "classes"):
        if key in settings:
            config[key] = settings.pop(key)
    config["pools"]["p"] |= settings
    return config
