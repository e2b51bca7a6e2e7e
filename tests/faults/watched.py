"""A load on backends that the gateway watches."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.faults.fakes import Fake
from tests.faults.process import GatewayProcess, pool
from tests.faults.rawclient import Response, ask, chat

WATCHED: dict[str, Any] = {
    "health": {"interval": "1s", "unhealthy_after": 3, "healthy_after": 2},
    "signals": {"interval": "250ms"},
    "routing": "round_robin",
    "concurrency": 64,
}


class Load:
    """Requests at a rate, from many clients. `answers` are in the order of their sending, with what each took."""

    def __init__(self, gateway: GatewayProcess, per_s: float = 50.0, **fields: Any) -> None:
        self.answers: list[tuple[float, float, Response]] = []
        self._gateway = gateway
        self._request = chat(**fields)
        self._pause_s = 1.0 / per_s

    async def run(self, seconds: float) -> list[Response]:
        """For so long. Returns the answers of this time."""
        begun, number, asked = time.monotonic(), 0, []
        while time.monotonic() < begun + seconds:
            asked.append(asyncio.create_task(self._one()))
            number += 1
            await asyncio.sleep(max(0.0, begun + number * self._pause_s - time.monotonic()))
        return list(await asyncio.gather(*asked))

    async def _one(self) -> Response:
        sent = time.monotonic()
        response = await ask(self._gateway.port, self._request)
        self.answers.append((sent, time.monotonic() - sent, response))
        return response


def statuses(answers: list[Response]) -> dict[int, int]:
    return dict(Counter(answer.status for answer in answers))


async def up(gateway: GatewayProcess, *fakes: Fake) -> None:
    """Until every backend has passed its probes."""

    async def found() -> bool:
        states = [await gateway.metric("headrace_backend_state", backend=fake.url, state="up") for fake in fakes]
        return all(state == 1 for state in states)

    await gateway.eventually(found, "all backends are up", timeout_s=10)


async def administered(tmp_path: Path, *urls: str, **told: Any) -> tuple[dict[str, Any], httpx.AsyncClient]:
    (tmp_path / "token").write_text("of-the-admin")
    config = pool(*urls, **WATCHED | {"server": {"admin_token": f"file:{tmp_path}/token"}} | told)
    return config, httpx.AsyncClient(timeout=10, headers={"authorization": "Bearer of-the-admin"})
