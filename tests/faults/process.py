"""A real gateway process, and the invariants that must hold after whatever a test did to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.fakes import Fake, gathering, healthy
from tests.faults.rawclient import ask, chat

KEY = "hr-test-key-of-the-tests"
BEARER = f"Authorization: Bearer {KEY}"
TOKEN = "admin-token-of-the-tests"
DIGEST = "acad01ef4387d57e7610cc14084d6ff0170b4145469eaf3abbbabc36c9b6c5b3"
BAD_WORDS = ("Traceback", "never retrieved", "Failed to detach", "was never awaited", "Task was destroyed", "ASGI")
FULL = bool(os.environ.get("HEADRACE_FULL_TESTS"))  # with it the cases run at full length, which takes minutes
STREAM_S = 5.0 if FULL else 0.8  # a stream of a case
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class GatewayProcess:
    """`async with GatewayProcess(config, folder) as gateway`: one `headrace serve` with free ports; with `workers`, one
    that has so many."""

    def __init__(
        self, config: dict[str, Any], folder: Path, environ: dict[str, str] | None = None, *, workers: int = 1
    ) -> None:
        self._workers = workers
        self.config = {"server": {}, "telemetry": {}} | config
        self.config["server"] = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"} | self.config["server"]
        self.path = folder / "headrace.yaml"
        self.log_path = folder / "headrace.log"
        self.secrets: list[str] = []
        self.port = self.admin_port = 0
        self._environ = os.environ | {"ADMIN_TOKEN": TOKEN} | (environ or {})
        self._process: asyncio.subprocess.Process | None = None
        self._http = httpx.AsyncClient(timeout=10, verify=False)
        self._fds = 0
        self._before: Samples = {}
        self._log_from = 0

    async def __aenter__(self) -> GatewayProcess:
        self.path.write_text(json.dumps(self.config))  # JSON is YAML
        with self.log_path.open("wb") as log:
            arguments = ["serve", "-c", str(self.path), f"--workers={self._workers}"]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.cli", *arguments, stderr=log, env=self._environ
            )
        try:
            await self._begun(self._process)
        except BaseException:
            if self._process.returncode is None:
                self._process.kill()  # an event loop does not close before the last of its children has ended
                await self._process.wait()
            raise
        return self

    async def _begun(self, process: asyncio.subprocess.Process) -> None:
        await self.eventually(
            lambda: "headrace serves" in self.log or process.returncode is not None,
            "the gateway is up",
            timeout_s=20 * self._workers * busy(),
        )
        found = re.search(r"serves https?://\S+:(\d+)/v1 .*:(\d+)\)", self.log)
        assert found, self.log
        self.port, self.admin_port = int(found[1]), int(found[2])
        await self.get("/metrics")
        self._fds = self.fds

    async def begin(self) -> None:
        """Another test begins on the same process: counters and log are read from here on."""
        await self.eventually(self._all_logged, "every request has its line")
        self._log_from = self.log_path.stat().st_size
        self._before = await self.samples()

    async def __aexit__(self, kind: object, *exc: object) -> None:
        process = self._process
        assert process is not None
        await self._http.aclose()
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
    def workers(self) -> list[int]:
        """The processes that serve for it, by what the system knows of whose children they are."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def log(self) -> str:
        """What the process wrote since the test began."""
        return self.log_path.read_bytes()[self._log_from :].decode(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The request log."""
        whole, _, _ = self.log.rpartition("\n")  # the last line may be half written
        return [line for line in self._json_lines(whole) if line["event"] == "request"]

    @property
    def states(self) -> list[tuple[str, str]]:
        """What became of which backend, in order."""
        return [(line["backend"], line["state"]) for line in self._json_lines(self.log) if line["event"] == "backend"]

    @staticmethod
    def _json_lines(text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.split("\n") if line.startswith("{") and line.endswith("}")]

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
        return await self._http.get(f"http://127.0.0.1:{self.admin_port}{path}")

    async def admin(self, path: str, method: str = "GET", token: str = TOKEN) -> httpx.Response:
        """From the admin port, with its token."""
        return await self.asked(method, path, {"authorization": f"Bearer {token}".encode()})

    async def asked(self, method: str, path: str, headers: Mapping[str, bytes]) -> httpx.Response:
        """From the admin port, with these headers."""
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        return await self._http.request(
            method, url, headers=[(name.encode(), value) for name, value in headers.items()]
        )

    def write(self, told: dict[str, Any] | str) -> None:
        """Replace the configuration file at once, as a careful writer does; the listeners stay unless `told` says."""
        if isinstance(told, dict):
            told = told | {"server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"} | told.get("server", {})}
            self.config = {"telemetry": {}} | told
            told = json.dumps(self.config)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(told)
        fresh.replace(self.path)

    async def reloaded(self, told: dict[str, Any] | str) -> dict[str, Any]:
        """What the admin API answers when it is told to take this configuration."""
        self.write(told)
        answer: dict[str, Any] = (await self.admin("/admin/reload", "POST")).json()
        return answer

    async def samples(self) -> Samples:
        """All samples of /metrics, which must parse."""
        return samples_of((await self.get("/metrics")).text)

    async def since(self) -> Samples:
        """All samples; those that only grow are counted from the beginning of the test."""
        before = {key: value for key, value in self._before.items() if key[0].endswith(GROWING)}
        return {key: value - before.get(key, 0) for key, value in (await self.samples()).items()}

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of one name that carry these labels."""
        wanted = set(labels.items())
        return sum(value for (key, found), value in (await self.since()).items() if key == name and wanted <= found)

    async def outcomes(self) -> dict[str, int]:
        """Requests by outcome."""
        counts: dict[str, int] = {}
        for (name, labels), value in (await self.since()).items():
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

    async def _lively(self) -> bool:
        begun = time.monotonic()
        assert (await self.get("/livez")).status_code == 200
        return time.monotonic() - begun < 0.2

    async def _all_logged(self) -> bool:
        return len(self.lines) == sum((await self.outcomes()).values())

    async def idle(self, fakes: Sequence[Fake] = ()) -> None:
        """Wait until nothing is in flight, queued, or open at the backends."""

        async def still() -> bool:
            gauges = {key: value for key, value in (await self.samples()).items() if key[0] in GAUGES}
            assert all(value >= 0 for value in gauges.values()), gauges
            return not any(gauges.values()) and not any(fake.open_requests for fake in fakes)

        await self.eventually(still, "gauges and backends idle")

    async def settled(
        self,
        fakes: Sequence[Fake] = (),
        *,
        sent: int | None = None,
        outcomes: Mapping[str, int] | None = None,
        fds: int = 5,
    ) -> None:
        """The invariants: nothing in flight, nothing queued, nothing open at the backends, descriptors as before, no
        fault in the log, no secret anywhere, one outcome and one line for each request `sent`, all capacity usable
        again."""
        await self.idle(fakes)
        assert [error for fake in fakes for error in fake.errors] == []
        idle = sum(len(fake.tasks) for fake in fakes)
        await self.eventually(lambda: self.fds <= self._fds + idle + fds, "descriptors at the baseline", timeout_s=8)
        await self.eventually(self._all_logged, "every request has its line")
        found = await self.outcomes()
        assert outcomes is None or found == outcomes
        assert sent is None or sum(found.values()) == sent
        await self.eventually(self._lively, "liveness answers in time")
        metrics = (await self.get("/metrics")).text
        for word in BAD_WORDS:
            assert word not in self.log, self.log[-4000:]
        for secret in (KEY, TOKEN, *self.secrets):
            assert secret not in self.log
            assert secret not in metrics
        for model, (count, urls) in self.capacity.items():
            if count <= MOST_AT_ONCE and urls <= {fake.url for fake in fakes}:
                await self._full(model, count, [fake for fake in fakes if fake.url in urls])

    @property
    def capacity(self) -> dict[str, tuple[int, set[str]]]:
        """For one model of each pool, how many requests its backends may run together, and their URLs."""
        found = {}
        for model, told in {told["pool"]: (model, told) for model, told in self.config["models"].items()}.values():
            backends = self.config["pools"][told["pool"]]["backends"]
            found[model] = (sum(each["concurrency"] for each in backends), {each["url"] for each in backends})
        return found

    async def _full(self, model: str, count: int, fakes: Sequence[Fake]) -> None:
        """`count` requests at once: each is answered only when the last one of them has reached a backend."""
        script = gathering(count)
        for fake in fakes:
            await fake.play(script)
        headers = [f"Authorization: Bearer {KEY}"] if self.config.get("tenants") else []
        request = chat(*headers, model=model)
        answers = await asyncio.gather(*(ask(self.port, request) for _ in range(count)))
        assert [answer.status for answer in answers] == [200] * count, f"{model} cannot use its {count} places"
        for fake in fakes:
            await fake.play(healthy)


GAUGES = ("headrace_in_flight_requests", "headrace_queued_requests")
GROWING = ("_total", "_count", "_sum", "_bucket")
MOST_AT_ONCE = 64  # places that are tried out; a test of more does so itself


def pool(*urls: str, engine: str = "vllm", **settings: Any) -> dict[str, Any]:
    """A configuration with one pool, one model `m`, fast clocks, no tenants unless given, and nobody who judges the
    backends unless `health` or `signals` are given."""
    concurrency = settings.pop("concurrency", 16)
    backends = [{"url": url, "concurrency": concurrency} for url in urls]
    config: dict[str, Any] = {
        "pools": {
            "p": {"engine": engine, "backends": backends, "timeouts": CLOCKS | settings.pop("timeouts", {})} | UNWATCHED
        },
        "models": {"m": {"pool": "p"}},
    }
    for key in ("server", "models", "tenants", "classes"):
        if key in settings:
            config[key] = settings.pop(key)
    config["pools"]["p"] |= settings
    return config


def samples_of(text: str) -> Samples:
    """What a scrape says."""
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def busy() -> float:
    """How many times longer anything may take, since other work wants these cores too; 1 where none does."""
    return max(1.0, 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1))


def times(full: int, short: int) -> range:
    """As often as a case says, or as the ordinary suite can afford."""
    return range(full if FULL else short)


UNWATCHED = {"health": {"interval": "0s", "eject": False}, "signals": {"interval": "0s"}}  # scripts see requests only
CLOCKS = {"connect": "1s", "headers": "2s", "first_token": "2s", "idle": "3s", "total": "60s"}
