"""`headrace top` shows in a terminal what the feed says."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from gateway.topview import bar, spark
from tests.console.conftest import DEAD, TOKEN, busy, load, look
from tests.service import Service, run, started


def test_one_picture(gateway: Service) -> None:
    """Backends, who waits, refusals and bad requests; with the token of the configuration's file."""
    load(gateway)
    with busy(gateway):
        done = run("top", "--once", "-c", str(gateway.log.parent / "headrace.yaml"), "--admin", gateway.admin)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["small", "interactive", "3"] in [row[:3] for row in rows]
    assert {row[2] for row in rows if row[:1] == ["torn"] and len(row) > 3} == {"down"}
    assert "██████████" in done.stdout and "2/2" in done.stdout
    assert any(row[:1] == ["no_backend"] for row in rows)
    assert "globex <b>" in done.stdout and "slow: prefill" in done.stdout


def test_one_picture_for_programs(gateway: Service) -> None:
    """With rates, which need two looks."""
    done = run("top", "--once", "--json", "--admin", gateway.admin, HEADRACE_ADMIN_TOKEN=TOKEN)
    told = json.loads(done.stdout)
    assert told["figures"]["requests_s"] is not None
    assert {each["pool"] for each in told["backends"]} == {"large", "small", "torn"}


def test_why_not(gateway: Service, tmp_path: Path) -> None:
    """A wrong token, and an address where nobody listens."""
    done = run("top", "--once", "--admin", gateway.admin, HEADRACE_ADMIN_TOKEN="wrong")
    assert done.returncode == 1 and "does not take this token" in done.stderr
    done = run("top", "--once", "--admin", "http://127.0.0.1:9")
    assert done.returncode == 1 and "does not answer" in done.stderr
    done = run("top", "--once", "--admin", gateway.api)
    assert done.returncode == 1 and "404" in done.stderr and "Is it the admin port" in done.stderr


@pytest.mark.parametrize("way", ["Ctrl-C", "q"])
@pytest.mark.parametrize("plain", [False, True])
def test_it_follows_until_it_is_stopped(gateway: Service, way: str, plain: bool) -> None:
    """In a terminal, on a screen of its own, which it gives back; without colours where none are wanted."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"HEADRACE_ADMIN_TOKEN": TOKEN, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "50"}
    command = [sys.executable, "-m", "gateway.cli", "top", "--admin", gateway.admin]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # who runs in the background would pass on that it is ignored
    environ |= {"NO_COLOR": "1"} if plain else {}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    settings = termios.tcgetattr(theirs)
    said, deadline = b"", time.monotonic() + 60
    while said.count(b"backends") < 2 and time.monotonic() < deadline:
        said += os.read(ours, 65536)
    if way == "q":
        os.write(ours, b"xq")
    else:
        process.send_signal(signal.SIGINT)
    while b"\x1b[?1049l" not in said and time.monotonic() < deadline:
        said += os.read(ours, 65536)
    assert process.wait(30) == 0
    assert termios.tcgetattr(theirs) == settings
    os.close(theirs)
    os.close(ours)
    assert said.count(b"backends") >= 2 and b"\x1b[?1049h" in said and b"\x1b[?1049l" in said
    assert b"Traceback" not in said and (b"\x1b[3" in said) is not plain
    host = httpx.URL(look(gateway)["backends"][0]["backend"])
    assert f"{host.host}:{host.port}".encode() in said  # however narrow, a backend can be told from another


def test_it_waits_for_a_gateway_that_is_restarted(tmp_path: Path) -> None:
    """What was last seen stays, with a word that it is old."""
    told = {"server": {"admin_token": "file:token"}, "pools": {"p": {"backends": [{"url": DEAD}]}}}
    told["models"] = {"m": {"pool": "p"}}
    ours, theirs = pty.openpty()
    environ = os.environ | {"HEADRACE_ADMIN_TOKEN": TOKEN, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"}
    with ExitStack() as stack:
        with ExitStack() as first:
            service = started(first, tmp_path, told, token=TOKEN)
            command = [sys.executable, "-m", "gateway.cli", "top", "--admin", service.admin]
            process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
            said = _until(ours, b"backends")
        assert b"NOT CONNECTED" not in said
        said = _until(ours, b"NOT CONNECTED")
        assert b"backends" in said + _until(ours, b"backends")
        admin = service.admin.removeprefix("http://")
        started(stack, tmp_path, told | {"server": told["server"] | {"admin": admin}}, token=TOKEN)
        _until(ours, b"\x1b[Hheadrace", b"\x1b[1mheadrace")
        os.write(ours, b"q")
        _until(ours, b"\x1b[?1049l")
        assert process.wait(30) == 0
    os.close(theirs)
    os.close(ours)


def _until(terminal: int, *words: bytes) -> bytes:
    said, deadline = b"", time.monotonic() + 60
    while not any(word in said for word in words):
        assert time.monotonic() < deadline, said[-2000:]
        said += os.read(terminal, 65536)
    return said


def test_what_is_no_terminal_is_told_what_to_ask_for(gateway: Service) -> None:
    """Lines for people make no sense in a file."""
    done = run("top", "--admin", gateway.admin, HEADRACE_ADMIN_TOKEN=TOKEN)
    assert done.returncode == 2 and "--once" in done.stderr and not done.stdout


@pytest.mark.parametrize("command", [("top", "--once"), ("backends", "list"), ("tenants",), ("canary", "status")])
def test_every_command_says_what_to_do(gateway: Service, command: tuple[str, ...]) -> None:
    """About a token that is missing, wrong or impossible, and a URL that is none; without the credentials in it."""
    asked = (*command, "--admin", gateway.admin.replace("http://", "http://user:hush@"))
    for token, words in (("", "asks for its token"), ("wrong", "does not take this token"), ("tökén", "No header")):
        done = run(*asked, HEADRACE_ADMIN_TOKEN=token)
        assert done.returncode == (2 if token == "tökén" else 1), done.stderr
        assert words in done.stderr and "HEADRACE_ADMIN_TOKEN" in done.stderr and "hush" not in done.stderr
        assert "Traceback" not in done.stderr
    done = run(*command, "--admin", "nonsense")
    assert done.returncode == 2 and "begins with http://" in done.stderr


def test_what_is_wrong_with_the_file_is_said_where_it_stays(tmp_path: Path) -> None:
    """Not on the screen that is gone a moment later."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gateway.cli", "top", "-c", str(tmp_path / "none.yaml")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    assert process.wait(60) == 2
    said = os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    assert b"none.yaml: cannot be read: No such file" in said
    assert b"\x1b[?1049h" not in said


@pytest.mark.parametrize("command", [("top", "--once"), ("backends", "list")])
def test_a_narrow_terminal_does_not_cut_the_names_of_backends(gateway: Service, command: tuple[str, ...]) -> None:
    """At 60 columns one can be told from another, and its URL copied."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"HEADRACE_ADMIN_TOKEN": TOKEN, "TERM": "dumb", "COLUMNS": "60", "LINES": "24"}
    asked = [sys.executable, "-m", "gateway.cli", *command, "--admin", gateway.admin]
    process = subprocess.Popen(asked, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # a terminal that nobody writes to any more
        while more := os.read(ours, 65536):
            said += more
    os.close(ours)
    assert process.wait(60) == 0
    folded = "".join(line.strip() for line in said.decode().splitlines())
    for each in look(gateway)["backends"]:
        host, port = each["backend"].removeprefix("http://").split(":")
        assert f"{host}:{port[:3]}" in folded  # top folds it into two lines


def test_bars_and_sparks() -> None:
    """Full, half, beyond, unknown; the largest is the tallest."""
    assert bar(1.0) == bar(7.0) == "█" * 12
    assert bar(0.5) == "█" * 6 + "·" * 6
    assert bar(None) == " " * 12
    assert spark([0.0, None, 4.0, 2.0]) == "  █▄"
    assert spark([]) == ""
