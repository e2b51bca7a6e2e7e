"""The processes of a crew: kept, whatever the machine lacks for a while."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from gateway.address import Address
from gateway.config import parse
from gateway.logs import LogWriter
from gateway.orders import Orders
from gateway.workers import Crew

pytestmark = pytest.mark.anyio


async def until(condition: object, timeout_s: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_worker_comes_back_that_could_not_be_started_for_a_while(tmp_path: Path) -> None:
    """It was killed while the supervisor had no descriptor left for another one. Who asks it meanwhile gets nothing."""
    text = '{"pools": {"p": {"backends": [{"url": "http://127.0.0.1:1"}]}}, "models": {"m": {"pool": "p"}}}'
    path = tmp_path / "headrace.yaml"
    path.write_text(text)
    orders = Orders(parse(text, str(path)), path, Address("127.0.0.1", 0), 1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (tmp_path / "log").open("wb") as log:
        async with Crew(1, tmp_path, orders, LogWriter(log.fileno()), time.monotonic) as crew:
            assert await crew.wait_complete() is None
            worker = crew.up[0]
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
                os.kill(worker.process.pid, signal.SIGKILL)
                await until(lambda: crew.restarts)
                assert await worker.ask("GET", "/readyz") is None
                assert not crew.up
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            await until(lambda: crew.up)
            answer = await crew.up[0].ask("GET", "/readyz")
            assert answer is not None and answer.status_code == 200
