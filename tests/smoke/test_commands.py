"""The other commands as processes: emulated backends, configurations checked, keys made, and help that teaches."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import yaml

from gateway.processes import Running, running
from loadtests.faults import FAULTS
from loadtests.profiles import PROFILES
from tests.service import run

CHAT = {"model": "big", "messages": [{"role": "user", "content": "How?"}], "max_tokens": 3}
GOOD = "pools: {p: {backends: [{url: http://127.0.0.1:1}]}}\nmodels: {m: {}}\n"


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        told = ["emulate", "--port=0", "--model=big", "--engine=llama-3-70b-h100", "--speed=10", "--json"]
        yield stack.enter_context(running("gateway.cli", [*told, "--fault=503:3@0.5"], tmp_path / "emulator.log"))


def test_an_emulated_backend_answers_and_fails_as_told(emulator: Running) -> None:
    """Half of the requests get a refusal, the others an answer; and it ends when it is told to."""
    url = emulator.announced["url"]
    assert emulator.announced | {"url": ""} == {"url": "", "model": "big", "engine": "llama-3-70b-h100"}
    answers = [httpx.post(f"{url}/v1/chat/completions", json=CHAT) for _ in range(40)]
    assert {answer.status_code for answer in answers} == {200, 503}
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "3"}
    emulator.process.send_signal(signal.SIGTERM)
    assert emulator.process.wait(10) == 0


def test_an_emulator_that_cannot_listen_says_why() -> None:
    """Exit code 1, the address, and what to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("emulate", f"--port={port}")
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in ended.stderr


def test_an_emulator_at_a_name_that_there_is_not_says_so() -> None:
    """In words, not as a number of the resolver's."""
    ended = run("emulate", "--host=nosuch.invalid", "--port=0")
    assert ended.returncode == 1
    assert "cannot listen on nosuch.invalid:0: " in ended.stderr and "Unknown error" not in ended.stderr


@pytest.mark.parametrize(
    ("wrong", "known"),
    [
        ("--engine=gpt-5", tuple(PROFILES)),
        ("--fault=flood", tuple(FAULTS)),
        ("--speed=0", ("x>0",)),
        ("--fault=503@2", ("RATE from 0",)),
    ],
)
def test_an_emulator_names_what_there_is(wrong: str, known: tuple[str, ...]) -> None:
    """Exit code 2 and the choices."""
    ended = run("emulate", wrong, COLUMNS="100")
    assert ended.returncode == 2
    assert all(name in ended.stderr for name in known)


def test_the_doctor_says_at_once_that_it_is_asked_of_no_gateway(emulator: Running) -> None:
    """Engines have metrics, too."""
    ended = run("doctor", emulator.announced["url"], "--window=1h")
    assert ended.returncode == 1
    assert "is no gateway's: there is no headrace_build_info" in ended.stderr


@pytest.mark.parametrize("command", ["serve", "check", "keys new", "keys list", "tenants", "emulate", "demo"])
def test_help_teaches(command: str) -> None:
    """With examples that can be copied."""
    ended = run(*command.split(), "--help")
    assert ended.returncode == 0
    assert f"  headrace {command}" in ended.stdout.partition("Options:")[0]
    assert "--json" in ended.stdout


def test_help_lists_engines_and_faults() -> None:
    """All there are."""
    said = run("emulate", "--help").stdout
    assert all(f"\n    {name} " in said for name in (*PROFILES, *FAULTS))


def test_a_good_file_is_shown_whole(tmp_path: Path) -> None:
    """As YAML, as JSON, and what differs from another one."""
    path, other = tmp_path / "headrace.yaml", tmp_path / "old.yaml"
    path.write_text(GOOD)
    other.write_text(GOOD + "server: {drain: 5s}\n")
    shown, document = run("check", str(path)), run("check", "--json", str(path))
    assert shown.returncode == document.returncode == 0
    assert yaml.safe_load(shown.stdout) == json.loads(document.stdout)
    assert json.loads(document.stdout)["models"]["m"]["pool"] == "p"
    assert run("check", "--diff", str(other), str(path)).stdout == "~ server.drain: 5s -> 30s\n"
    assert json.loads(run("check", "--diff", str(path), str(path), "--json").stdout) == {"changes": []}


def test_a_key_is_made_with_its_entry() -> None:
    """Each another one; what stands in the file is its hash, under the tenant's name whatever that is."""
    first, second = (json.loads(run("keys", "new", "acme", "--json").stdout) for _ in range(2))
    assert first["key"] != second["key"]
    assert first["sha256"] == sha256(first["key"].encode()).hexdigest()
    said = run("keys", "new", "a: b").stdout
    key = said.partition("shown only now:")[2].split()[0]
    entry = yaml.safe_load(said.partition("for headrace.yaml:")[2])
    assert entry["tenants"]["a: b"]["keys"][0]["sha256"] == sha256(key.encode()).hexdigest()


def test_a_key_may_have_a_name_and_an_end() -> None:
    """As a date or as a duration; the entry that is printed is one that a file may hold."""
    made = json.loads(run("keys", "new", "acme", "--id", "blue", "--expires", "2031-01-31", "--json").stdout)
    assert (made["id"], made["expires"]) == ("blue", "2031-01-31T00:00:00Z")
    said = run("keys", "new", "acme", "--expires", "90d").stdout
    entry = yaml.safe_load(said.partition("for headrace.yaml:")[2])["tenants"]["acme"]["keys"][0]
    ends = datetime.fromisoformat(entry["expires"])
    assert timedelta(days=89) < ends - datetime.now(UTC) <= timedelta(days=90)
    bad = run("keys", "new", "acme", "--expires", "soon")
    assert bad.returncode == 2
    assert "90d" in bad.stderr
    over = run("keys", "new", "acme", "--expires", "2020-01-31")
    assert over.returncode == 2 and "2020-01-31 is over" in over.stderr and not over.stdout


def test_the_keys_of_a_file_are_listed(tmp_path: Path) -> None:
    """Whose they are and until when they are good; as a table and for machines."""
    keys = [{"id": "old", "sha256": "1" * 64, "expires": "2020-01-01"}, {"sha256": "2" * 64}]
    path = tmp_path / "headrace.yaml"
    path.write_text(GOOD + yaml.safe_dump({"tenants": {"acme": {"keys": keys}}}))
    found = json.loads(run("keys", "list", "-c", str(path), "--json").stdout)["keys"]
    assert [(key["tenant"], key["id"], key["state"], key["expires"]) for key in found] == [
        ("acme", "old", "expired", "2020-01-01T00:00:00Z"),
        ("acme", "acme-2", "good", None),
    ]
    rows = [line.split() for line in run("keys", "list", "-c", str(path)).stdout.splitlines() if "acme" in line]
    assert rows == [
        ["acme", "old", "1" * 12, "expired", "2020-01-01T00:00:00Z"],
        ["acme", "acme-2", "2" * 12, "good", "never"],
    ]
    assert run("keys", "list", "-c", str(tmp_path / "none.yaml")).returncode == 2


def test_tenants_are_asked_of_a_gateway_that_runs() -> None:
    """One that does not is told, with what to look at."""
    ended = run("tenants", "--admin", "http://127.0.0.1:1")
    assert ended.returncode == 1
    assert "server.admin" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", [("check", "{file}"), ("keys", "list", "-c", "{file}"), ("logs", "{log}")])
def test_a_full_disk_is_told_in_a_line(command: tuple[str, ...], tmp_path: Path) -> None:
    """Whoever writes a table into a file finds out why it is not whole; no traceback, and none at the end of Python."""
    (tmp_path / "headrace.yaml").write_text(GOOD)
    (tmp_path / "headrace.log").write_text("a line\n")
    words = [word.format(file=tmp_path / "headrace.yaml", log=tmp_path / "headrace.log") for word in command]
    with Path("/dev/full").open("w") as full:
        asked = [sys.executable, "-m", "gateway.cli", *words]
        ended = subprocess.run(asked, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "Error: the output cannot be written: No space left on device\n"


def test_a_gateway_serves_though_its_log_is_on_a_full_disk(tmp_path: Path) -> None:
    """What it would say there is lost; requests are not."""
    asked = [sys.executable, "-m", "gateway.cli", "serve", "--backend", "http://127.0.0.1:1", "--json"]
    with Path("/dev/full").open("w") as full:
        asked += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=full)
        assert process.stdout is not None
        announced = process.stdout.readline()
        assert announced, process.wait(10)
        assert httpx.get(f"{json.loads(announced)['admin']}/healthz").status_code == 200
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()


@pytest.mark.parametrize("alphabet", ["ascii", "latin-1"])
def test_a_terminal_of_another_alphabet_gets_what_it_can_show(alphabet: str, tmp_path: Path) -> None:
    """A question mark for the rest."""
    path = tmp_path / "headrace.yaml"
    path.write_text(GOOD + f"tenants: {{Ökonomie-№1: {{keys: [{{sha256: {'1' * 64}}}]}}}}\n")
    ended = run("keys", "list", "-c", str(path), PYTHONIOENCODING="utf-8")
    assert "Ökonomie-№1" in ended.stdout
    asked = [sys.executable, "-m", "gateway.cli", "keys", "list", "-c", str(path)]
    shown = subprocess.run(asked, check=True, capture_output=True, env=os.environ | {"PYTHONIOENCODING": alphabet})
    assert "Ökonomie-№1".encode(alphabet, "replace") in shown.stdout
