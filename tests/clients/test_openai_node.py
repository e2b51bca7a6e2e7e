"""OpenAI's official library for Node, through a gateway process. The scenarios run once, in one Node process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.clients.busy import busy_once
from tests.clients.conftest import KEY
from tests.service import Service, started

HERE = Path(__file__).parent / "node"
ROOT = HERE.parents[2]
Seen = dict[str, Any]

missing = [name for name in ("node", "npm") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {' and '.join(missing)}")


@pytest.fixture(scope="module")
def seen(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """What each scenario saw."""
    subprocess.run(["make", "--silent", "node-client"], cwd=ROOT, check=True)
    with ExitStack() as stack:
        backend = stack.enter_context(busy_once())
        pool = {"backends": [{"url": backend}], "retries": {"attempts": 0}}
        busy = started(stack, tmp_path_factory.mktemp("busy"), {"pools": {"p": pool}, "models": {"m": {}}})
        command = ["node", "scenarios.mjs", f"{service.api}/v1", KEY, f"{busy.api}/v1"]
        ran = subprocess.run(command, cwd=HERE, check=False, capture_output=True, timeout=90, text=True)
        assert ran.returncode == 0, ran.stderr
        yield json.loads(ran.stdout)


def test_chat_whole_and_streamed_agree(seen: Seen, service: Service) -> None:
    """And the id that the library gives is in the log."""
    chat = seen["chat"]
    assert chat["whole"] == chat["streamed"] != ""
    assert service.line(chat["requestID"])["outcome"] == "ok"


def test_the_raw_response_is_there(seen: Seen) -> None:
    """Status, headers and the parsed answer."""
    raw = seen["raw_response"]
    assert (raw["status"], raw["model"]) == (200, "m")
    assert raw["id"].startswith("req_")


def test_tools_stream_to_a_call(seen: Seen) -> None:
    """The library's own accumulator puts the call together."""
    assert seen["tools"] == {"name": "weather", "keys": ["city"]}


def test_responses_whole_and_streamed_agree(seen: Seen) -> None:
    """Events are numbered without a gap."""
    responses = seen["responses"]
    assert responses["whole"] == responses["streamed"] != ""
    assert responses["numbers"] == list(range(len(responses["numbers"])))


def test_embeddings_forms_and_models(seen: Seen) -> None:
    """The other endpoints."""
    assert seen["embeddings"] == [16, 16]
    assert seen["transcription"]
    assert seen["models"] == {"names": ["m", "gpt-4o", "org/name:8b"], "one": "org/name:8b"}


def test_twenty_streams_say_the_same(seen: Seen) -> None:
    """At once, on as many connections as the library opens."""
    assert seen["many_streams"] == 1


def test_leaving_a_stream_frees_the_backend(seen: Seen, service: Service) -> None:
    """A broken loop aborts the request; nothing goes on running for it."""
    assert seen["leaving"] == 3
    assert service.metric("headrace_requests_total", outcome="client_disconnect") >= 1
    service.eventually(service.settled)


@pytest.mark.parametrize(
    ("scenario", "kind", "status", "code"),
    [
        ("wrong_key", "AuthenticationError", 401, "invalid_api_key"),
        ("unknown_model", "NotFoundError", 404, "model_not_found"),
        ("unknown_url", "NotFoundError", 404, "unknown_url"),
        ("bad_request", "BadRequestError", 400, "400"),
        ("rate_limited", "RateLimitError", 429, "429"),
        ("crashed", "InternalServerError", 500, None),
        ("unavailable", "InternalServerError", 503, "503"),
        ("hung_up", "InternalServerError", 502, "upstream_error"),
    ],
)
def test_refusals_become_exceptions(seen: Seen, scenario: str, kind: str, status: int, code: str | None) -> None:
    """The right class, and an id to ask about."""
    refused = seen[scenario]
    assert (refused["kind"], refused["status"], refused["code"]) == (kind, status, code)
    assert refused["requestID"]


def test_a_stream_that_breaks_raises_after_what_came(seen: Seen) -> None:
    """The role and three tokens, then the gateway's error frame."""
    broken = seen["broken_stream"]
    assert broken["seen"] == 4
    assert (broken["kind"], broken["code"]) == ("APIError", "upstream_error")


def test_retries_wait_as_long_as_they_are_told(seen: Seen) -> None:
    """The answer of the second try, a second later."""
    assert seen["retry_after"]["text"] == "now"
    assert seen["retry_after"]["waited_ms"] >= 1000
