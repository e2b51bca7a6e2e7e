"""`headrace top` shows in a terminal what the feed says."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from gateway.top import bar, spark
from tests.console.conftest import TOKEN, busy, load
from tests.service import Service, run


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
    assert done.returncode == 1 and "Authorization: Bearer" in done.stderr
    done = run("top", "--once", "--admin", "http://127.0.0.1:9")
    assert done.returncode == 1 and "does not answer" in done.stderr
    done = run("top", "--once", "--admin", gateway.api)
    assert done.returncode == 1 and "404" in done.stderr


def test_it_follows_until_it_is_stopped(gateway: Service) -> None:
    """In a terminal, on a screen of its own, which it gives back on Ctrl-C."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"HEADRACE_ADMIN_TOKEN": TOKEN, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "50"}
    command = [sys.executable, "-m", "gateway.cli", "top", "--admin", gateway.admin]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # who runs in the background would pass on that it is ignored
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    said, deadline = b"", time.monotonic() + 60
    while said.count(b"backends") < 2 and time.monotonic() < deadline:
        said += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(30) == 0
    assert said.count(b"backends") >= 2 and b"\x1b[?1049h" in said and b"\x1b[?1049l" in said
    assert b"Traceback" not in said


def test_bars_and_sparks() -> None:
    """Full, half, beyond, unknown; the largest is the tallest."""
    assert bar(1.0) == bar(7.0) == "█" * 12
    assert bar(0.5) == "█" * 6 + "·" * 6
    assert bar(None) == " " * 12
    assert spark([0.0, None, 4.0, 2.0]) == "  █▄"
    assert spark([]) == ""
