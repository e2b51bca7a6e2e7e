"""A real engine: llama.cpp's own server, with a random model, behind a gateway process."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from loadtests.llamacpp import serving
from tests.clients import tiny_gguf
from tests.clients.conftest import TURNS
from tests.clients.tap import Tap, tapped
from tests.service import Service, started

pytest.importorskip("xllamacpp", reason="xllamacpp has no wheel for this platform")

SLOTS = 4
SAMPLED = {"temperature": 0, "seed": 1, "cache_prompt": False}  # so that the same question has the same answer
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 16},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/responses": {"input": "Once upon a time", "max_output_tokens": 16},
    "/v1/messages": {"messages": TURNS, "max_tokens": 16},
}
# What differs from one answer to the next: ids and times.
PASSING = re.compile(
    rb'"(?:chatcmpl|resp|msg|rs)[-_]\w+"|"(?:created|created_at|completed_at)":\d+|"timings":\{[^}]*\}'
)
# Without it a token may be a part of a character: a stream that begins with one lacks the engine's first event, and one
# that ends with one lacks its last letter.
LETTERS = {"grammar": "root ::= [a-z ]+"}
LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}


@dataclass(frozen=True)
class Engine:
    """The engine's own URL, the tap in the line to it, and the gateway before both: `tapped` goes through the tap."""

    url: str
    embedder: str
    tap: Tap
    gateway: Service

    def metric(self, name: str) -> float:
        found = re.search(rf"^llamacpp:{name} (\S+)", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        assert found
        return float(found[1])

    def busy(self) -> int:
        """How many slots work for somebody."""
        return sum(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots").json())

    def wait_free(self) -> None:
        """Until no slot works. The engine finds out that a client is gone when it has told nobody anything for a
        second (which includes the answer to this question), so it is not to be asked often."""
        self.gateway.eventually(lambda: self.busy() == 0, every_s=1.5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two servers, one of them for embeddings; only `m` is asked by another name than the engine's own."""
    folder = tmp_path_factory.mktemp("llamacpp")
    model = tiny_gguf.write(folder / "tiny.gguf")
    with ExitStack() as stack:
        url = stack.enter_context(serving(model, "tiny", slots=SLOTS, context_tokens=tiny_gguf.CONTEXT))
        embedder = stack.enter_context(serving(model, "embed", slots=2, embeddings=True))
        tap = stack.enter_context(tapped(url))
        told = {
            name: {"engine": "llamacpp", "backends": [{"url": url, "concurrency": SLOTS}]}
            for name, url in (("text", url), ("tapped", tap.url), ("embed", embedder))
        }
        models: dict[str, Any] = {"tiny": {"pool": "text"}, "embed": {"pool": "embed"}}
        models |= {"tapped": {"pool": "tapped", "upstream_name": "tiny"}}
        yield Engine(url, embedder, tap, started(stack, folder, {"pools": told, "models": models}))


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Engine) -> Iterator[None]:
    """After every test the gateway is idle, and so is the engine."""
    yield
    engine.gateway.eventually(engine.gateway.settled)
    engine.wait_free()
    assert "Traceback" not in engine.gateway.log.read_text()


def post(url: str, path: str, **body: Any) -> httpx.Response:
    """On a connection of its own: the engine hangs up kept ones without a word."""
    return httpx.post(url + path, json=body, timeout=60)


def lasting(answer: bytes) -> bytes:
    """An answer without what differs from one to the next."""
    return PASSING.sub(b'"..."', answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ASKED)
def test_the_gateway_answers_as_the_engine_does(engine: Engine, path: str, stream: bool) -> None:
    """Byte for byte, but for ids and times, what the engine answers when it is asked directly."""
    body = ASKED[path] | SAMPLED | {"model": "tiny", "stream": stream, "ignore_eos": True}
    if "completions" in path and stream:
        body["stream_options"] = {"include_usage": True}
    direct, through = post(engine.url, path, **body), post(engine.gateway.api, path, **body)
    assert direct.status_code == through.status_code == 200
    assert direct.headers["content-type"] == through.headers["content-type"]
    assert lasting(direct.content) == lasting(through.content) != direct.content
    logged = engine.gateway.line(through.headers["x-request-id"])
    assert (logged["outcome"], logged["tokens_out"], logged["stream"]) == ("ok", 16, stream)
    assert (logged["ttft_ms"] is not None) == stream


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ASKED)
def test_no_byte_of_an_answer_is_changed(engine: Engine, path: str, stream: bool) -> None:
    """What a tap between gateway and engine saw is what the client got: ids, times and all."""
    body = ASKED[path] | {"model": "tapped", "stream": stream, "stream_options": {"include_usage": True}}
    if not stream or "completions" not in path:
        del body["stream_options"]
    got = post(engine.gateway.api, path, **body)
    assert got.status_code == 200
    assert got.content == engine.tap.answers()[-1]
    assert len(got.content) > 200


def test_only_the_usage_that_nobody_asked_for_is_taken_out(engine: Engine) -> None:
    """The gateway asks for usage to count it; the client gets every other byte."""
    asked = {"model": "tapped", "messages": TURNS, "max_tokens": 8, "ignore_eos": True}
    got = post(engine.gateway.api, "/v1/chat/completions", **asked, stream=True)
    sent = engine.tap.answers()[-1]
    events = sent.split(b"\n\n")
    usage = [event for event in events if b'"choices":[]' in event]
    assert len(usage) == 1
    assert got.content == sent.replace(usage[0] + b"\n\n", b"")
    assert engine.gateway.line(got.headers["x-request-id"])["tokens_out"] == 8


def test_tokens_and_embeddings(engine: Engine) -> None:
    """The endpoints that generate nothing, as the engine answers them."""
    for url, path, body in (
        (engine.url, "/tokenize", {"model": "tiny", "content": "water"}),
        (engine.url, "/detokenize", {"model": "tiny", "tokens": [119, 97, 116, 101, 114]}),
        (engine.url, "/v1/messages/count_tokens", {"model": "tiny", "messages": TURNS}),
        (engine.embedder, "/v1/embeddings", {"model": "embed", "input": ["water", "oil"]}),
    ):
        direct, through = post(url, path, **body), post(engine.gateway.api, path, **body)
        assert direct.status_code == through.status_code == 200
        assert direct.content == through.content


def test_errors_of_the_engine_get_the_shape_of_the_api(engine: Engine) -> None:
    """llama.cpp's have no `param`, and a code that is a number; what else they say stays."""
    for path, body, status in (
        ("/v1/chat/completions", {"model": "tiny", "messages": "none"}, 400),
        ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]}, 501),
    ):
        direct, through = post(engine.url, path, **body), post(engine.gateway.api, path, **body)
        assert direct.status_code == through.status_code == status
        told, error = direct.json()["error"], through.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error == told | {"code": str(told["code"]), "param": None}


def test_official_libraries_read_it(engine: Engine) -> None:
    """OpenAI's and Anthropic's, whole and streamed."""
    with openai.OpenAI(base_url=f"{engine.gateway.api}/v1", api_key="none", max_retries=0) as client:
        chat: dict[str, Any] = {"model": "tiny", "messages": TURNS, "max_tokens": 12, "temperature": 0}
        chat["extra_body"] = LETTERS
        whole = client.chat.completions.create(**chat)
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        events = list(
            client.responses.create(model="tiny", input="water", max_output_tokens=8, stream=True, extra_body=LETTERS)
        )
        assert events[-1].type == "response.completed"
        assert len(client.embeddings.create(model="embed", input="water").data[0].embedding) == tiny_gguf.WIDTH
    with (
        anthropic.Anthropic(base_url=engine.gateway.api, api_key="none", max_retries=0) as client,
        client.messages.stream(model="tiny", messages=TURNS, max_tokens=12, extra_body=SAMPLED) as stream,
    ):
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text != ""


def test_cached_tokens_are_counted(engine: Engine) -> None:
    """The second time most of the prompt comes from the engine's cache: it says so, and the metrics add it up."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "The same long question. " * 40}],
        "max_tokens": 1,
    }
    before = engine.gateway.metric("headrace_tokens_total", model="tiny", direction="cached")
    answers = [post(engine.gateway.api, "/v1/chat/completions", **body) for _ in range(2)]
    usages = [answer.json()["usage"] for answer in answers]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[1] > 900
    lines = [engine.gateway.line(answer.headers["x-request-id"]) for answer in answers]
    assert [line["tokens_cached"] for line in lines] == cached
    counted = engine.gateway.metric("headrace_tokens_total", model="tiny", direction="cached") - before
    assert counted == sum(cached)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_frees_its_slot(engine: Engine, stream: bool) -> None:
    """The engine stops: it would have gone on for thirty thousand tokens."""
    gone = engine.gateway.metric("headrace_requests_total", outcome="client_disconnect")
    before = engine.metric("tokens_predicted_total")
    with ExitStack() as leaving:
        if stream:
            asked = httpx.stream("POST", f"{engine.gateway.api}/v1/completions", json=LONG | {"stream": True})
            lines = leaving.enter_context(asked).iter_lines()
            assert next(lines).startswith("data: ")
        else:
            client = leaving.enter_context(httpx.Client(timeout=0.5))
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{engine.gateway.api}/v1/completions", json=LONG)
        assert engine.busy() == 1
    engine.wait_free()
    engine.gateway.eventually(
        lambda: engine.gateway.metric("headrace_requests_total", outcome="client_disconnect") == gone + 1
    )
    assert 0 < engine.metric("tokens_predicted_total") - before < 25_000


def test_who_finds_no_slot_waits_in_the_gateway(engine: Engine) -> None:
    """The engine would hold the fifth of four streams back without a bound, and not notice that it leaves. So it
    never gets there: it waits before it, and leaves, or is next."""
    gateway, waiting = engine.gateway, "headrace_queued_requests"
    with ExitStack() as streams, httpx.Client(timeout=60) as patient, ThreadPoolExecutor(1) as pool:
        asked = [
            httpx.stream("POST", f"{gateway.api}/v1/completions", json=LONG | {"stream": True}, timeout=60)
            for _ in range(SLOTS)
        ]
        lines = [streams.enter_context(each).iter_lines() for each in asked]
        assert all(next(each).startswith("data: ") for each in lines)
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.5) as impatient:
            impatient.post(f"{gateway.api}/v1/completions", json=LONG)
        gateway.eventually(lambda: gateway.metric(waiting) == 0)
        fifth = pool.submit(patient.post, f"{gateway.api}/v1/completions", json=LONG | {"max_tokens": 1})
        gateway.eventually(lambda: gateway.metric(waiting) == 1)
        assert (engine.busy(), engine.metric("requests_deferred")) == (SLOTS, 0)
        streams.close()
        assert fifth.result().status_code == 200
        assert gateway.line(fifth.result().headers["x-request-id"])["queue_ms"] > 0


def test_kept_connections_that_the_engine_drops_cost_no_request(engine: Engine) -> None:
    """It closes a kept connection after 100 requests, and after a stream whenever it likes; nobody is told."""
    before = len(engine.tap.lines)
    body = {"model": "tapped", "prompt": "x", "max_tokens": 1}
    with httpx.Client(timeout=60) as client:
        answers = [
            client.post(f"{engine.gateway.api}/v1/completions", json=body | {"stream": number % 3 == 2})
            for number in range(330)
        ]
    assert {answer.status_code for answer in answers} == {200}
    assert all(b'"finish_reason":"length"' in answer.content for answer in answers)
    assert 3 <= len(engine.tap.lines) - before <= 330 / 2, "they are kept, and dropped"


def test_idle_connections_that_the_engine_drops_cost_no_request(engine: Engine, tmp_path: Path) -> None:
    """It closes one that was idle for 5 s; the gateway does so after 4. Clients come back around both, each to a pool
    of its own: in one pool they would all be given the connection that was used last."""
    pauses_s = {f"after-{ms}": ms / 1000 for ms in (3800, 3950, 4000, 4200, 4700, 4950, 4990, 5000, 5010, 5050)}
    pools = {name: {"engine": "llamacpp", "backends": [{"url": engine.url}]} for name in pauses_s}
    models = {name: {"pool": name, "upstream_name": "tiny"} for name in pauses_s}

    def comes_back(name: str) -> list[int]:
        statuses = []
        for pause_s in (0, pauses_s[name]):
            time.sleep(pause_s)
            statuses.append(post(gateway.api, "/v1/completions", model=name, prompt="x", max_tokens=1).status_code)
        return statuses

    with ExitStack() as stack, ThreadPoolExecutor(len(pauses_s)) as clients:
        gateway = started(stack, tmp_path, {"pools": pools, "models": models})
        assert list(clients.map(comes_back, pauses_s)) == [[200, 200]] * len(pauses_s)
