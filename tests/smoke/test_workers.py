"""`headrace serve --workers N`: several processes on one port that look like one. With a real store."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.contract.servers import Server
from tests.contract.servers import started as store
from tests.service import Service, emulating, run, serving

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "How?"}], "max_tokens": 5}
ENDLESS = CHAT | {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
TOKEN = "admin-token-of-the-tests"
ADMIN = {"authorization": f"Bearer {TOKEN}"}
WORKERS = 3


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with store("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as stack:
        yield emulating(stack, tmp_path_factory.mktemp("backend"))


def told(backend: str, valkey: Server, **more: Any) -> dict[str, Any]:
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "admin_token": "file:token"} | more.pop("server", {})
    return {
        "server": server,
        "pools": {"p": {"engine": "vllm", "backends": [{"url": backend, "cost_per_hour": 1.0}]}},
        "models": {"m": {"slo": {"ttft": "30s"}}},
        "state": {"url": valkey.url},
    } | more


def write(path: Path, text: dict[str, Any] | str) -> None:
    """Replaces the file at once."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text if isinstance(text, str) else json.dumps(text))
    fresh.replace(path)


def begun(stack: ExitStack, folder: Path, text: dict[str, Any]) -> Service:
    (folder / "token").write_text(TOKEN)
    write(folder / "headrace.yaml", text)
    return serving(stack, folder, "-c", str(folder / "headrace.yaml"), f"--workers={WORKERS}")


@pytest.fixture(scope="module")
def gateway(backend: str, valkey: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For tests that leave it as it is."""
    with ExitStack() as stack:
        yield begun(stack, tmp_path_factory.mktemp("gateway"), told(backend, valkey))


@pytest.fixture
def own(backend: str, valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """For tests that mistreat it. However it ends, no file stays behind."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with ExitStack() as stack:
        yield begun(stack, tmp_path, told(backend, valkey))
    assert list(scratch.iterdir()) == []


def children(pid: int) -> list[int]:
    """The workers, none of which has been lost sight of: they are looked for by their parent, not by a list."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def admin(gateway: Service, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    return httpx.request(method, f"{gateway.admin}/admin/{path}", headers=ADMIN, timeout=30, **more)


def ask(gateway: Service, number: int) -> None:
    """Each on a connection of its own, so that the kernel gives them to all workers."""
    for _ in range(number):
        assert httpx.post(f"{gateway.api}/v1/chat/completions", json=CHAT, timeout=30).status_code == 200


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_workers_share_one_port_and_are_counted_together(gateway: Service) -> None:
    """Their requests add up in both formats, each family once, and what they only know does not."""
    before = gateway.metric("headrace_requests_total", outcome="ok")
    ask(gateway, 60)
    assert gateway.metric("headrace_requests_total", outcome="ok") == before + 60
    assert gateway.metric("headrace_request_seconds_count", model="m") == before + 60
    assert gateway.metric("headrace_workers") == WORKERS
    assert gateway.metric("headrace_build_info") == gateway.metric("headrace_config_generation") == 1
    assert (
        gateway.metric("headrace_backend_state", state="up")
        == gateway.metric("headrace_limiter_mode", mode="shared")
        == 1
    )
    assert gateway.metric("headrace_objective_seconds", objective="ttft") == 30
    text = httpx.get(f"{gateway.admin}/metrics").text
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    openmetrics = httpx.get(f"{gateway.admin}/metrics", headers=accept).text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) > 50
    assert {family.name for family in read_text(text)} == {family.name for family in read_openmetrics(openmetrics)}
    served = {line for line in gateway.log.read_text().splitlines() if '"event":"request"' in line}
    assert len(served) == before + 60 and all(json.loads(line) for line in served)
    assert httpx.get(f"{gateway.admin}/readyz").json() == {
        "ready": True,
        "reason": None,
        "workers": 3,
        "workers_ready": 3,
    }


def test_reads_are_of_all_workers(gateway: Service) -> None:
    """Usage, tenants and backends add up; a picture is of all; what is one worker's is asked of one."""
    before = {row["tenant"]: row["requests"] for row in admin(gateway, "usage").json()["rows"]}.get("anonymous", 0)
    ask(gateway, 30)
    rows = admin(gateway, "usage").json()["rows"]
    assert [(row["tenant"], row["model"], row["requests"]) for row in rows] == [("anonymous", "m", before + 30)]
    assert admin(gateway, "usage?format=csv").text.splitlines()[1].startswith(f"anonymous,m,{before + 30},")
    assert admin(gateway, "usage?from=junk").status_code == 400
    (shown,) = admin(gateway, "backends").json()["backends"]
    assert shown["state"] == "up" and shown["why"] == ""
    (tenant,) = admin(gateway, "tenants").json()["tenants"]
    assert tenant["tenant"] == "anonymous" and tenant["running"] == 0
    decision = admin(gateway, "explain?worker=2", "POST", json=CHAT)
    assert decision.json()["pool"] == "p"
    assert admin(gateway, "explain?worker=9", "POST", json=CHAT).status_code == 400
    with httpx.stream("GET", f"{gateway.admin}/admin/live", headers=ADMIN, timeout=30) as events:
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        next(lines)
        ask(gateway, 10)
        for line in lines:
            picture = json.loads(line.removeprefix("data: "))
            if picture["figures"]["requests_s"]:
                break
    assert picture["workers"] == WORKERS and picture["backends"][0]["state"] == "up"
    assert picture["figures"]["goodput"] == 1.0 and picture["history"]["requests_s"][-1] > 0
    assert httpx.get(f"{gateway.admin}/admin/usage").status_code == 401
    assert run("top", "--once", f"--admin={gateway.admin}", HEADRACE_ADMIN_TOKEN=TOKEN).returncode == 0
    assert run("doctor", gateway.admin, "--window=1s").returncode == 0


def test_without_a_shared_store_it_says_what_to_do(backend: str, tmp_path: Path) -> None:
    """Exit code 2, the key and the fix; one worker needs none."""
    path = tmp_path / "headrace.yaml"
    path.write_text(json.dumps({"pools": {"p": {"backends": [{"url": backend}]}}, "models": {"m": {}}}))
    for where in (["-c", str(path)], ["--backend", backend]):
        ended = run("serve", *where, "--workers=2")
        assert ended.returncode == 2
        assert "state.url" in ended.stderr and "redis://" in ended.stderr
    assert run("serve", "-c", str(path), "--workers=0").returncode == 2


def test_a_worker_that_cannot_begin_ends_all(backend: str, valkey: Server, tmp_path: Path) -> None:
    """More connections are promised than the system has descriptors for: that is said, with exit code 1."""
    path = tmp_path / "headrace.yaml"
    (tmp_path / "token").write_text(TOKEN)
    path.write_text(json.dumps(told(backend, valkey, server={"max_connections": 2_000_000_000})))
    ended = run("serve", "-c", str(path), "--workers=2")
    assert ended.returncode == 1
    assert "server.max_connections" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_named(gateway: Service, backend: str, valkey: Server, tmp_path: Path) -> None:
    """Also where those who have it would share it, as workers do."""
    (tmp_path / "token").write_text(TOKEN)
    path = tmp_path / "headrace.yaml"
    path.write_text(json.dumps(told(backend, valkey, server={"listen": gateway.api.removeprefix("http://")})))
    ended = run("serve", "-c", str(path), "--workers=2")
    assert ended.returncode == 1
    assert "Address already in use" in ended.stderr and "server.listen" in ended.stderr


def test_a_reload_reaches_all_or_none(own: Service, backend: str, valkey: Server, tmp_path: Path) -> None:
    """One verdict: when it is given, every worker knows the new model; a bad file changes none, nor the next worker."""
    path = tmp_path / "headrace.yaml"
    two = told(backend, valkey) | {"models": {"m": {}, "two": {"pool": "p", "upstream_name": "m"}}}

    def models() -> set[frozenset[str]]:
        answers = [httpx.get(f"{own.api}/v1/models").json() for _ in range(30)]
        return {frozenset(model["id"] for model in answer["data"]) for answer in answers}

    write(path, two)
    answer = admin(own, "reload", "POST")
    assert answer.status_code == 200 and answer.json()["generation"] == 2
    assert models() == {frozenset(("m", "two"))}
    write(path, "pools: 1\n")
    answer = admin(own, "reload", "POST")
    assert answer.status_code == 422 and answer.json()["problems"]
    assert own.metric("headrace_config_last_reload_successful") == 0
    os.kill(children(own.process.pid)[0], signal.SIGKILL)
    own.eventually(lambda: own.metric("headrace_worker_restarts_total") == 1)
    own.eventually(lambda: own.metric("headrace_workers") == WORKERS)
    assert models() == {frozenset(("m", "two"))}
    write(path, told(backend, valkey))
    own.process.send_signal(signal.SIGHUP)
    own.eventually(lambda: own.metric("headrace_config_generation") == 3)
    own.eventually(lambda: models() == {frozenset(("m",))})
    assert own.metric("headrace_config_last_reload_successful") == 1
    write(path, two)  # it is seen that it changed
    own.eventually(lambda: models() == {frozenset(("m", "two"))})


def test_a_drained_backend_stays_so_in_a_new_worker(own: Service, backend: str) -> None:
    """Changes at run time reach all workers, and those that are started later."""
    assert admin(own, "backends/drain", "POST", json={"url": backend}).json()["state"] == "draining"
    assert own.metric("headrace_backend_state", state="draining") == 1
    assert own.metric("headrace_backend_state", state="up") == 0
    os.kill(children(own.process.pid)[0], signal.SIGKILL)
    own.eventually(lambda: own.metric("headrace_worker_restarts_total") == 1)
    own.eventually(lambda: own.metric("headrace_workers") == WORKERS)
    (shown,) = admin(own, "backends").json()["backends"]
    assert (shown["state"], shown["why"]) == ("draining", "")
    assert admin(own, "backends/junk", "POST", json={"url": backend}).status_code == 404
    assert admin(own, "backends/undrain", "POST", json={"url": backend}).status_code == 200
    own.eventually(lambda: own.metric("headrace_backend_state", state="draining") == 0)
    own.eventually(lambda: admin(own, "backends").json()["backends"][0]["state"] == "up")
    ask(own, 20)


def streams(stack: ExitStack, gateway: Service, number: int, **more: Any) -> list[Iterator[str]]:
    """Streams that have begun."""
    found = []
    for _ in range(number):
        body = ENDLESS | more
        asked = httpx.stream("POST", f"{gateway.api}/v1/chat/completions", json=body, timeout=60)
        lines = stack.enter_context(asked).iter_lines()
        assert next(lines).startswith("data: ")
        found.append(lines)
    return found


def test_sigterm_drains_all(own: Service) -> None:
    """None is ready, running streams end as they should, nothing is left, and it ends well."""
    workers = children(own.process.pid)
    assert len(workers) == WORKERS
    with ExitStack() as stack:
        running = streams(stack, own, 6, max_tokens=1000)
        own.process.send_signal(signal.SIGTERM)
        own.eventually(lambda: httpx.get(f"{own.admin}/readyz").json()["reason"] == "draining")
        for lines in running:
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert own.process.wait(30) == 0
    assert alive(workers) == []
    assert [line["outcome"] for line in own.lines()] == ["ok"] * 6


def test_a_second_sigterm_ends_all_at_once(own: Service) -> None:
    """Streams that would run for a quarter of an hour are told, and cut."""
    workers = children(own.process.pid)
    with ExitStack() as stack:
        running = streams(stack, own, 6)
        own.process.send_signal(signal.SIGTERM)
        own.eventually(lambda: httpx.get(f"{own.admin}/readyz").status_code == 503)
        own.process.send_signal(signal.SIGTERM)
        for lines in running:
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
    assert own.process.wait(20) == 0
    assert alive(workers) == []


@pytest.mark.parametrize("hung", [False, True], ids=["well", "hung"])
def test_nobody_outlives_a_supervisor_that_is_killed(own: Service, hung: bool) -> None:
    """Workers notice, and end with their streams; so does one whose event loop hangs, once it can."""
    workers = children(own.process.pid)
    with ExitStack() as stack:
        running = streams(stack, own, 4)
        if hung:
            os.kill(workers[0], signal.SIGSTOP)
        own.process.kill()
        own.process.wait()
        if hung:
            os.kill(workers[0], signal.SIGCONT)
        deadline = time.monotonic() + 20
        while alive(workers):
            assert time.monotonic() < deadline, "an orphan lives on"
            time.sleep(0.05)
        for lines in running:
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
