"""Traces as a real collector takes them: rotel, under .cache (`make test-observability` installs it)."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.observability.tools import NEEDED, ROOT
from tests.service import emulating, started

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def collector() -> Path:
    """Its program."""
    for found in (ROOT / ".cache/rotel/lib").glob("python*/site-packages/rotel/rotel-agent"):
        return found
    assert not NEEDED, "rotel is not there: make test-observability"
    pytest.skip("needs rotel: make test-observability")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_real_collector_takes_a_trace(tmp_path: Path) -> None:
    """The server's span under the caller's, and the attempt's with its attributes."""
    program, port, other = collector(), free_port(), free_port()
    command = [str(program), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{other}", "--exporter", "blackhole"]
    command += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    seen = tmp_path / "rotel.log"
    with ExitStack() as stack:
        log = stack.enter_context(seen.open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
        stack.callback(process.wait, 20)
        stack.callback(process.kill)
        engine = emulating(stack, tmp_path, "--model=m")
        told = {
            "pools": {"p": {"engine": "vllm", "backends": [{"url": engine}]}},
            "models": {"m": {}},
            "telemetry": {"otlp": f"http://127.0.0.1:{port}", "sample": "100%"},
        }
        service = started(stack, tmp_path, told)
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4}
        url = f"{service.api}/v1/chat/completions"
        assert httpx.post(url, json=asked, headers={"traceparent": CALLER}, timeout=30).status_code == 200
        deadline = time.monotonic() + 20
        while "chat m" not in (text := seen.read_text(errors="replace")):
            assert time.monotonic() < deadline, text[-3000:]
            time.sleep(0.1)
        assert service.metric("headrace_traces_total", result="exported") == 1
    assert re.search(r"POST /v1/chat/completions", text)
    assert CALLER[3:35] in text and CALLER[36:52] in text
    for name in ("gen_ai.request.model", "gen_ai.usage.output_tokens", "gen_ai.provider.name", "headrace.backend"):
        assert name in text, name
