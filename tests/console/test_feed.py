"""The feed of a real gateway: who may watch, how many, and that watching does not keep it from stopping."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx

from gateway.feed import MOST
from tests.console.conftest import ADMIN, TOKEN
from tests.service import Service, started

TOLD = {
    "server": {"admin_token": "file:token"},
    "pools": {"p": {"backends": [{"url": "http://127.0.0.1:9"}]}},
    "models": {"m": {"pool": "p"}},
}


def gateway(stack: ExitStack, folder: Path) -> Service:
    return started(stack, folder, TOLD, token=TOKEN)


def watching(stack: ExitStack, service: Service) -> httpx.Response:
    return stack.enter_context(httpx.stream("GET", f"{service.admin}/admin/live", headers=ADMIN, timeout=30))


def test_a_gateway_that_stops_tells_who_watches(tmp_path: Path) -> None:
    """The stream ends as an answer does, at once, and nothing is said of it in the log."""
    with ExitStack() as stack:
        service = gateway(stack, tmp_path)
        lines = watching(stack, service).iter_lines()
        assert next(lines).startswith("data: ")
        service.process.send_signal(signal.SIGTERM)
        rest = list(lines)  # raises if the stream is broken off
        assert service.process.wait(20) == 0
        said = service.log.read_text()
    assert all(line == "" or line.startswith("data: ") for line in rest)
    assert "Traceback" not in said and "ERROR" not in said, said


def test_only_so_many_may_watch(tmp_path: Path) -> None:
    """The next one is told so, and may come when one has left."""
    with ExitStack() as stack:
        service = gateway(stack, tmp_path)
        with ExitStack() as viewers:
            assert {watching(viewers, service).status_code for _ in range(MOST)} == {200}
            refused = watching(viewers, service)
            assert refused.status_code == 503 and b"watch" in refused.read()

        def comes_in() -> bool:
            with ExitStack() as one:
                return watching(one, service).status_code == 200

        service.eventually(comes_in)


def test_without_the_token_there_is_nothing_to_see(tmp_path: Path) -> None:
    """And what is not kept is not found."""
    with ExitStack() as stack:
        service = gateway(stack, tmp_path)
        assert httpx.get(f"{service.admin}/admin/live").status_code == 401
        assert httpx.get(f"{service.admin}/admin/recent/7", headers=ADMIN).status_code == 404
        assert httpx.get(f"{service.admin}/console").status_code == 200
