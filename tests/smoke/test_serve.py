"""`headrace serve` as a process: both ways to configure it, its signals, and what it says when it cannot serve."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.processes import StartFailed
from tests.service import Service, emulating, run, serving, started, tenant

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "How?"}], "max_tokens": 5}
ENDLESS = CHAT | {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
FREE = ("--listen=127.0.0.1:0", "--admin=127.0.0.1:0")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What was started ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def backend(stack: ExitStack, tmp_path: Path) -> str:
    return emulating(stack, tmp_path)


def pool(url: str, **told: Any) -> dict[str, Any]:
    return {"pools": {"p": {"engine": "vllm", "backends": [{"url": url}]}}, "models": {"m": {}}, **told}


def stream(stack: ExitStack, gateway: Service, **body: Any) -> Iterator[str]:
    """The lines of a stream that has begun."""
    asked = httpx.stream("POST", f"{gateway.api}/v1/chat/completions", json=CHAT | {"stream": True} | body, timeout=60)
    lines = stack.enter_context(asked).iter_lines()
    assert next(lines).startswith("data: ")
    return lines


def ready(gateway: Service) -> httpx.Response:
    return httpx.get(f"{gateway.admin}/readyz")


def test_backends_suffice(stack: ExitStack, backend: str, tmp_path: Path) -> None:
    """Without a file: two backends, any model name, no key."""
    gateway = serving(stack, tmp_path, *FREE, f"--backend={backend}", f"--backend={emulating(stack, tmp_path)}/v1")
    answers = [httpx.post(f"{gateway.api}/v1/chat/completions", json=CHAT) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    lines = gateway.eventually(lambda: len(gateway.lines()) == 8 and gateway.lines())
    assert len({line["backend"] for line in lines}) == 2
    assert gateway.metric("headrace_requests_total", tenant="anonymous", outcome="ok") == 8


def test_a_file_is_served(stack: ExitStack, backend: str, tmp_path: Path) -> None:
    """With tenants: a key is asked for, and the key that `keys new` makes is one."""
    made = json.loads(run("keys", "new", "acme", "--json").stdout)
    told = pool(backend, tenants={"acme": {"keys": [{"sha256": made["sha256"]}]}, "other": tenant("x", models=["m"])})
    gateway = started(stack, tmp_path, told | {"security": {"secret": "file:secret"}}, secret="s" * 64)
    url = f"{gateway.api}/v1/chat/completions"
    assert httpx.post(url, json=CHAT).status_code == 401
    assert httpx.post(url, json=CHAT, headers={"authorization": f"Bearer {made['key']}"}).status_code == 200
    assert gateway.metric("headrace_requests_total", tenant="acme", outcome="ok") == 1
    assert made["key"] not in gateway.log.read_text()


def test_ipv6_is_run(stack: ExitStack, backend: str, tmp_path: Path) -> None:
    """Both listeners, and a backend too."""
    emulated = emulating(stack, tmp_path, "--host=::1")
    gateway = serving(stack, tmp_path, "--listen=[::1]:0", "--admin=[::1]:0", f"--backend={emulated}")
    assert gateway.api.startswith("http://[::1]:")
    assert httpx.post(f"{gateway.api}/v1/chat/completions", json=CHAT).status_code == 200
    assert ready(gateway).status_code == 200


def test_sigterm_drains(stack: ExitStack, backend: str, tmp_path: Path) -> None:
    """It is not ready any more, refuses what is new, lets the running stream end, and ends well itself."""
    gateway = serving(stack, tmp_path, *FREE, f"--backend={backend}")
    lines = stream(stack, gateway, max_tokens=200, ignore_eos=True)
    kept = stack.enter_context(httpx.Client())
    assert kept.get(f"{gateway.api}/v1/models").status_code == 200
    assert ready(gateway).json() == {"ready": True, "reason": None}
    gateway.process.send_signal(signal.SIGTERM)
    gateway.eventually(lambda: ready(gateway).status_code == 503)
    assert ready(gateway).json() == {"ready": False, "reason": "draining"}
    for client in (kept, httpx):
        refused = client.post(f"{gateway.api}/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_shutting_down"
        assert refused.headers["x-headrace-reason"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"
    rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 150, "the stream was not over when it was told to drain"
    assert gateway.process.wait(20) == 0
    assert [line["outcome"] for line in gateway.lines()] == ["shutting_down", "shutting_down", "ok"]


def test_a_second_sigterm_ends_at_once(stack: ExitStack, backend: str, tmp_path: Path) -> None:
    """The stream that would run for a quarter of an hour is told, and cut."""
    gateway = serving(stack, tmp_path, *FREE, f"--backend={backend}")
    lines = stream(stack, gateway, **ENDLESS)
    gateway.process.send_signal(signal.SIGTERM)
    gateway.eventually(lambda: ready(gateway).status_code == 503)
    assert gateway.process.poll() is None
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(10) == 0
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
    assert [line["outcome"] for line in gateway.lines()] == ["shutting_down"]


def test_a_drain_has_an_end(stack: ExitStack, backend: str, tmp_path: Path) -> None:
    """`server.drain` is how long running answers may go on; Ctrl-C is as good as SIGTERM."""
    gateway = started(stack, tmp_path, pool(backend, server={"drain": "500ms"}))
    lines = stream(stack, gateway, **ENDLESS)
    gateway.process.send_signal(signal.SIGINT)
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
    assert gateway.process.wait(10) == 0


@pytest.mark.parametrize("option", ["--listen", "--admin"])
def test_a_port_in_use_is_named(stack: ExitStack, backend: str, tmp_path: Path, option: str) -> None:
    """With exit code 1, the address, and what to change."""
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
    ended = run("serve", *FREE, f"{option}=127.0.0.1:{taken}", f"--backend={backend}")
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken}: Address already in use" in ended.stderr
    assert "--listen or --admin" in ended.stderr
    path = tmp_path / "headrace.yaml"
    path.write_text(json.dumps(pool(backend, server={"listen": f"127.0.0.1:{taken}"})))
    ended = run("serve", "-c", str(path))
    assert ended.returncode == 1
    assert "server.listen" in ended.stderr


def test_too_few_file_descriptors_are_told(tmp_path: Path) -> None:
    """Where fewer connections fit than the file promises: with exit code 1, and both ways out."""
    path = tmp_path / "headrace.yaml"
    free = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    path.write_text(json.dumps(pool("http://127.0.0.1:1", server=free | {"max_connections": 10_000})))
    shell = f"ulimit -n 1000; exec {sys.executable} -m gateway.cli serve -c {path}"
    ended = subprocess.run(["bash", "-c", shell], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "needs 20256 file descriptors, and the system allows 1000" in ended.stderr
    assert "ulimit -Hn" in ended.stderr and "set it to 372" in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("-c", "headrace.yaml", "--backend", "http://127.0.0.1:1"),
        ("-c", "headrace.yaml", "--listen", "127.0.0.1:0"),
        ("--backend", "127.0.0.1:8000"),
        ("--backend", "http://127.0.0.1:1", "--listen", "0.0.0.0:0"),
        ("--wrong",),
    ],
)
def test_bad_usage_is_told(arguments: tuple[str, ...]) -> None:
    """With exit code 2 and the way to the help."""
    ended = run("serve", *arguments)
    assert ended.returncode == 2
    assert "headrace serve --help" in ended.stderr
    assert "Error: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_bad_file_never_serves(tmp_path: Path) -> None:
    """With exit code 2 and every problem by its place; `check` says the same, and says it to machines too."""
    path = tmp_path / "headrace.yaml"
    path.write_text(
        "pools:\n  p: {backends: [{url: http://127.0.0.1:1}]}\nmodels:\n  m: {pool: q}\nserver: {drain: 5}\n"
    )
    places = [f"{path}:{line}:{column}" for line, column in ((4, 7), (5, 10))]
    for command in (("serve", "-c", str(path)), ("check", str(path))):
        ended = run(*command)
        assert ended.returncode == 2
        assert [line.partition(": ")[0] for line in ended.stderr.splitlines()] == places
    ended = run("check", "--json", str(path))
    assert ended.returncode == 2
    problems = json.loads(ended.stdout)["problems"]
    assert [(problem["line"], problem["column"], problem["key"]) for problem in problems] == [
        (4, 7, "models.m.pool"),
        (5, 10, "server.drain"),
    ]
    assert run("serve", "-c", str(tmp_path / "none.yaml")).returncode == 2


def test_what_does_not_come_up_is_told(tmp_path: Path) -> None:
    """The helper that starts processes gives the reason of one that ends."""
    with ExitStack() as stack, pytest.raises(StartFailed, match="Give either a file"):
        serving(stack, tmp_path)
