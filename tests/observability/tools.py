"""Prometheus and promtool, where they are: under .cache (`make prometheus`) or on the path."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
CACHED = ROOT / ".cache" / "prometheus" / "usr" / "bin"
NEEDED = bool(os.environ.get("HEADRACE_OBSERVABILITY"))  # set by `make test-observability`: then nothing is left out


def tool(name: str) -> str:
    """The path of a program; without it the test is skipped, or fails where it is needed."""
    found = shutil.which(name, path=f"{CACHED}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        assert not NEEDED, f"{name} is not there: make prometheus"
        pytest.skip(f"needs {name}: make prometheus")
    return found


@contextmanager
def running_prometheus(program: str, folder: Path) -> Iterator[str]:
    """Its URL, on a free port, with the configuration and the data of `folder`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    command = [program, "--config.file=prometheus.yml", f"--web.listen-address={address}"]
    command += ["--storage.tsdb.path=data", "--enable-feature=exemplar-storage"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not _ready(f"http://{address}/-/ready"):
            assert time.monotonic() < deadline and process.poll() is None, (folder / "prometheus.log").read_text()
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
