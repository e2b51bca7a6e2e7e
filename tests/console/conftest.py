"""A gateway with something to see, and a real Chromium that looks at it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service import Service, emulating, started, tenant

TOKEN = "admin-token-of-the-console"
ADMIN = {"authorization": f"Bearer {TOKEN}"}
NEEDED = bool(os.environ.get("HEADRACE_CONSOLE"))  # set by `make test-console`: then nothing is left out
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, as the system has it. Playwright keeps an event loop running while it is there: asynchronous tests of
    other modules could not run beside it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        assert not NEEDED, "there is no Chromium on the path"
        pytest.skip("needs Chromium on the path")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as run:
        launched = run.chromium.launch(executable_path=program, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Three pools, one of which is small and one dead; tenants with limits; a promise that nobody can keep."""
    with ExitStack() as stack:
        yield gateway_for(stack, tmp_path_factory.mktemp("console"))


def gateway_for(stack: ExitStack, folder: Path) -> Service:
    """It has already had a few requests of each kind."""
    engines = [emulating(stack, folder, "--model=m", "--engine=llama-3-8b-h100") for _ in range(3)]
    limits = {"requests_per_minute": 600, "concurrent": 40, "models": {"m": {"tokens_per_minute": 200_000}}}
    told = {
        "server": {"admin_token": "file:token"},
        "pools": {
            "large": {"engine": "vllm", "backends": [{"url": url} for url in engines[:2]]},
            "small": {"engine": "vllm", "backends": [{"url": engines[2], "concurrency": 2}]},
            "torn": {"engine": "vllm", "backends": [{"url": DEAD}], "health": {"interval": "500ms"}},
        },
        "models": {
            "m": {"pool": "large", "slo": {"ttft": "5s", "itl": "1s"}},
            "strict": {"pool": "large", "upstream_name": "m", "slo": {"ttft": "1ms", "itl": "1ms"}},
            "little": {"pool": "small", "upstream_name": "m"},
            "torn": {"pool": "torn", "upstream_name": "m"},
        },
        "classes": {"interactive": {"max_queued": 6, "max_wait": "60s"}, "batch": {"ceiling": "50%"}},
        "tenants": {"acme": tenant("key-a", limits=limits), "globex <b>": tenant("key-b")},
        "security": {"secret": "file:salt"},
    }
    service = started(stack, folder, told, salt="x" * 32, token=TOKEN)
    service.eventually(lambda: {each["state"] for each in look(service)["backends"]} == {"up", "down"})
    load(service)
    return service


def load(service: Service, *also: str) -> None:
    """A few requests of each kind at once, until all have ended."""
    kinds = ["m", "m", "strict", "torn", "m", "nothing", *also]
    with ThreadPoolExecutor(len(kinds)) as pool:
        assert all(pool.map(lambda each: one(service, *each), enumerate(kinds)))


def one(service: Service, number: int, model: str, tokens: int = 12) -> bool:
    """A streamed request."""
    headers = {"authorization": f"Bearer key-{'ab'[number % 2]}"}
    asked = {"model": model, "messages": [{"role": "user", "content": "What did the secret say? " * 40}]}
    asked |= {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    answer = httpx.post(f"{service.api}/v1/chat/completions", json=asked, headers=headers, timeout=90)
    return answer.status_code > 0


def events(service: Service, number: int) -> Iterator[dict[str, Any]]:
    """The next events of the feed."""
    with httpx.stream("GET", f"{service.admin}/admin/live", headers=ADMIN, timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
                number -= 1
            if not number:
                return


def look(service: Service) -> dict[str, Any]:
    """What there is to see now."""
    return next(events(service, 1))


@contextmanager
def busy(service: Service, *, tokens: int = 20_000) -> Iterator[None]:
    """More long streams for a small backend than it takes, so that some wait, as long as the block lasts."""
    body = {"model": "little", "messages": [{"role": "user", "content": "Go on. " * 400}]}
    body |= {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        client = stack.enter_context(httpx.Client(base_url=service.api, timeout=90))

        def held(number: int) -> None:
            headers = {"authorization": f"Bearer key-{'ab'[number % 2]}"}
            with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                for _ in answer.iter_raw():
                    if done:
                        return

        done: list[bool] = []
        waiting = [pool.submit(held, number) for number in range(5)]
        service.eventually(lambda: sum(row["waiting"] for row in look(service)["waiting"]) == 3)
        try:
            yield
        finally:
            done.append(True)
            for each in waiting:
                each.result(timeout=90)
            deadline = time.monotonic() + 30
            while not service.settled() and time.monotonic() < deadline:
                time.sleep(0.1)
