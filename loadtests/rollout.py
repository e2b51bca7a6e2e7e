"""A rolling restart under load: two gateways behind a TCP balancer, then every backend, one by one. Nobody may notice.

python -m loadtests.rollout. The exit code is 1 if anybody noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random

import httpx

from gateway.processes import Running, running
from loadtests.crowd import Crowd
from loadtests.judgement import Judgement, deliver, progress

KEY, TOKEN = "rollout", "rollout-admin"
NOTICE_S = 0.5  # between two looks of the balancer
LINGER = "2s"


@dataclass
class Replica:
    """One gateway, which may be restarted on the same ports."""

    folder: Path
    config: dict[str, object]
    api_port: int = 0
    admin_port: int = 0
    ready: bool = False
    up: Running | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    async def start(self) -> None:
        server = {
            "listen": f"127.0.0.1:{self.api_port}",
            "admin": f"127.0.0.1:{self.admin_port}",
            "admin_token": f"file:{self.folder}/token",
            "linger": LINGER,
        }
        self.folder.mkdir(exist_ok=True)
        (self.folder / "token").write_text(TOKEN)
        path = self.folder / "headrace.yaml"
        path.write_text(json.dumps(self.config | {"server": server}))
        told = ["serve", "--json", "-c", str(path)]
        self.up = await asyncio.to_thread(
            self._stack.enter_context, running("gateway.cli", told, self.folder / "headrace.log")
        )
        self.api_port = int(self.up.announced["api"].rsplit(":", 1)[1])
        self.admin_port = int(self.up.announced["admin"].rsplit(":", 1)[1])

    async def restart(self) -> int:
        """SIGTERM, wait for its end, start anew. Returns its exit code."""
        assert self.up is not None
        self.up.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.up.process.wait, 60)
        self._stack.close()
        await self.start()
        return code

    def close(self) -> None:
        self._stack.close()


@dataclass
class Balancer:
    """Connections in turn to replicas that say that they are ready, as it looked last."""

    replicas: list[Replica]
    port: int = 0
    turn: int = 0

    async def look(self) -> None:
        async with httpx.AsyncClient(timeout=2) as http:
            while True:
                for replica in self.replicas:
                    try:
                        answer = await http.get(f"http://127.0.0.1:{replica.admin_port}/readyz")
                        replica.ready = answer.status_code == httpx.codes.OK
                    except httpx.HTTPError:
                        replica.ready = False
                await asyncio.sleep(NOTICE_S)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = [replica for replica in self.replicas if replica.ready] or self.replicas
        self.turn += 1
        try:
            there = await asyncio.open_connection("127.0.0.1", ready[self.turn % len(ready)].api_port)
        except OSError:
            writer.transport.abort()
            return
        pipes = [asyncio.create_task(pipe(reader, there[1])), asyncio.create_task(pipe(there[0], writer))]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for task in pipes:
            task.cancel()
        there[1].close()
        writer.close()


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return


async def drained(replicas: list[Replica], url: str) -> None:
    """The backend gets no new work, and has finished what it had, at every gateway."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(timeout=5, headers=headers) as http:
        for replica in replicas:
            admin = f"http://127.0.0.1:{replica.admin_port}/admin/backends"
            (await http.post(f"{admin}/drain", json={"url": url})).raise_for_status()
            while True:
                told = (await http.get(admin)).json()["backends"]
                if not any(each["running"] for each in told if each["backend"] == url):
                    break
                await asyncio.sleep(0.1)


async def undrained(replicas: list[Replica], url: str) -> None:
    async with httpx.AsyncClient(timeout=5, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        for replica in replicas:
            admin = f"http://127.0.0.1:{replica.admin_port}/admin/backends"
            (await http.post(f"{admin}/undrain", json={"url": url})).raise_for_status()


@asynccontextmanager
async def replicas(folder: Path, urls: list[str]) -> AsyncIterator[list[Replica]]:
    """Two gateways before those backends."""
    pool = {"engine": "vllm", "health": {"interval": "1s"}, "backends": [{"url": url} for url in urls]}
    tenants = {"crowd": {"keys": [{"sha256": sha256(KEY.encode()).hexdigest()}]}}
    config: dict[str, object] = {"pools": {"p": pool}, "models": {"m": {"pool": "p"}}, "tenants": tenants}
    with ExitStack() as stack:
        found = [Replica(folder / f"gateway-{number}", config) for number in range(2)]
        for replica in found:
            stack.callback(replica.close)
            await replica.start()
        yield found


async def rollout(rate: float, seed: int = 1, backends: int = 3, pause_s: float = 4.0) -> Judgement:
    """One run, with so long between two restarts."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        engines: list[tuple[str, ExitStack]] = []
        for number in range(backends):
            engines.append(await engine(folder, number, 0))
            stack.callback(lambda number=number: engines[number][1].close())  # type: ignore[misc]
        async with replicas(folder, [url for url, _ in engines]) as gateways:
            balancer = Balancer(gateways)
            looking = asyncio.create_task(balancer.look())
            server = await asyncio.start_server(balancer.serve, "127.0.0.1", 0, backlog=1024)
            crowd = Crowd(server.sockets[0].getsockname()[1], rate, Random(seed), KEY, leave=0.0)
            asking = asyncio.create_task(crowd.run(3600.0))
            await asyncio.sleep(pause_s)
            codes = []
            for replica in gateways:
                codes.append(await replica.restart())
                await asyncio.sleep(pause_s)
            for number, (url, own) in enumerate(engines):
                await drained(gateways, url)
                await asyncio.to_thread(own.close)
                engines[number] = await engine(folder, number, int(url.rsplit(":", 1)[1]))
                await undrained(gateways, url)
                await asyncio.sleep(pause_s)
            asking.cancel()
            await crowd.finish()
            looking.cancel()
            server.close()
    failed = [each for each in crowd.told if not each.whole]
    judgement = Judgement(f"rolling restart of 2 gateways and {backends} backends, seed {seed}")
    judgement.tell("requests", len(crowd.told))
    judgement.none("failed", [f"{each.status} {each.code or each.lie}" for each in failed])
    judgement.none("gateways that did not end well", [f"exit code {code}" for code in codes if code])
    return judgement


async def judged(rate: float, seeds: list[int]) -> list[Judgement]:
    """A run for each seed."""
    found = []
    for seed in seeds:
        async with progress(f"rolling restart, seed {seed}", 45.0):
            found.append(await rollout(rate, seed))
    return found


async def engine(folder: Path, number: int, port: int) -> tuple[str, ExitStack]:
    own = ExitStack()
    told = ["emulate", f"--port={port}", "--json", f"--seed={number}"]
    up = await asyncio.to_thread(own.enter_context, running("gateway.cli", told, folder / f"engine-{number}.log"))
    return str(up.announced["url"]), own


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rate", type=float, default=15.0, help="requests per second")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    asked = parser.parse_args()
    sys.exit(deliver(asyncio.run(judged(asked.rate, asked.seeds)), as_json=asked.json))


if __name__ == "__main__":
    main()
