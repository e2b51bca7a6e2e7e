"""OpenAI's official Python library, through a gateway process: only `base_url` and `api_key` are ours."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clients.busy import busy_once
from tests.clients.conftest import KEY, SCHEMA, TURNS
from tests.service import Service, started

ASKED: dict[str, Any] = {"model": "m", "messages": TURNS, "max_tokens": 24}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.api}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def told(fault: str) -> dict[str, Any]:
    """The same question to a backend that fails."""
    return ASKED | {"extra_headers": {"x-emulate-fault": fault}}


def test_chat_whole_and_streamed_agree(client: openai.OpenAI, service: Service) -> None:
    """The text is the same both ways, and both are in the log under the id that the library gives."""
    whole = client.chat.completions.create(**ASKED)
    with client.chat.completions.create(**ASKED, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    logged = service.line(whole._request_id)
    assert (logged["tokens_in"], logged["tokens_out"]) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert logged["itl_ms"] is None
    streamed = service.line(stream.response.headers["x-request-id"])
    assert streamed["tokens_out"] == whole.usage.completion_tokens
    assert 0 < streamed["ttft_ms"] <= streamed["total_ms"]
    assert 0 <= streamed["itl_ms"] < streamed["total_ms"]  # 0 where a busy machine let all tokens come at once


def test_usage_is_streamed_to_those_who_ask(client: openai.OpenAI) -> None:
    """The gateway always asks the engine for usage; only who asked for it sees the chunk without choices."""
    asked = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    plain = list(client.chat.completions.create(**ASKED, stream=True))
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens > 0
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    assert len(asked) == len(plain) + 1


def test_an_alias_and_another_name_are_answered(client: openai.OpenAI) -> None:
    """The backend knows neither `gpt-4o` nor `org/name:8b`."""
    for name in ("gpt-4o", "org/name:8b"):
        assert client.chat.completions.create(**ASKED | {"model": name}).choices[0].message.content


def test_the_raw_response_is_there(client: openai.OpenAI) -> None:
    """Headers, the parsed answer, and the lines of a stream as they came."""
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    assert raw.retries_taken == 0
    assert raw.headers["x-request-id"] == raw.request_id
    assert raw.headers["x-headrace-class"] == "interactive"
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(**ASKED, stream=True) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-accel-buffering"] == "no"
        lines = list(response.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line == "" or line.startswith("data: ") for line in lines)


def test_tools_stream_to_a_call(client: openai.OpenAI) -> None:
    """The library's own accumulator puts the call together."""
    with client.chat.completions.stream(
        model="m", messages=TURNS, tools=TOOLS, tool_choice="required", max_tokens=200
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == done[0].name == "weather"
    assert calls[0].function.arguments == done[0].arguments


def test_legacy_completions_interleave(client: openai.OpenAI) -> None:
    """Two prompts in one stream."""
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="m", prompt=["one", "two"], max_tokens=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert all(texts.values())


def test_responses_whole_and_streamed_agree(client: openai.OpenAI, service: Service) -> None:
    """Events are numbered without a gap and end in the whole response."""
    asked: dict[str, Any] = {"model": "m", "input": "How does the water reach the turbine?", "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1]
    assert final.type == "response.completed"
    assert "".join(deltas) == whole.output_text == final.response.output_text
    assert service.line(stream.response.headers["x-request-id"])["tokens_out"] == 12


def test_embeddings_are_unpacked(client: openai.OpenAI) -> None:
    """The library asks for base64 and decodes it."""
    found = client.embeddings.create(model="m", input=["a", "b"], dimensions=16)
    assert [len(row.embedding) for row in found.data] == [16, 16]
    assert found.usage.total_tokens > 0


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the library's word for translations
def test_audio_goes_out_and_comes_in(client: openai.OpenAI) -> None:
    """Speech is bytes; a transcription and a translation take a form with a file."""
    with client.audio.speech.with_streaming_response.create(model="m", voice="alloy", input="hello you") as sound:
        wav = sound.read()
    assert client.audio.transcriptions.create(model="org/name:8b", file=("a.wav", io.BytesIO(wav))).text
    assert client.audio.translations.create(model="m", file=("a.wav", io.BytesIO(wav))).text


def test_images_are_made_and_edited(client: openai.OpenAI) -> None:
    """JSON one way, a form the other."""
    made = client.images.generate(model="m", prompt="a dam")
    edited = client.images.edit(model="m", prompt="a dam", image=("dam.png", b"\x89PNG"))
    assert made.data is not None
    assert edited.data is not None
    assert made.data[0].b64_json
    assert edited.data[0].b64_json


def test_models_are_those_of_the_tenant(client: openai.OpenAI) -> None:
    """Aliases are listed, hidden models are not, and a name may hold a slash and a colon."""
    assert [model.id for model in client.models.list()] == ["m", "gpt-4o", "org/name:8b"]
    assert client.models.retrieve("org/name:8b").id == "org/name:8b"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("hidden")
    assert refused.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error(service: Service) -> None:
    """For inference and for the list of models, with an id to ask about."""
    with openai.OpenAI(base_url=f"{service.api}/v1", api_key="wrong", max_retries=0) as client:
        for ask in (lambda: client.chat.completions.create(**ASKED), client.models.list):
            with pytest.raises(openai.AuthenticationError) as refused:
                ask()
            assert refused.value.code == "invalid_api_key"
            assert refused.value.request_id


def test_what_is_not_there_is_not_found(client: openai.OpenAI) -> None:
    """A model that nobody has, one that this tenant may not see, and an endpoint that is not served."""
    for name in ("nope", "hidden"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(**ASKED | {"model": name})
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as refused:
        client.files.list()
    assert refused.value.code == "unknown_url"


def test_bad_requests_are_told_by_gateway_and_engine(client: openai.OpenAI) -> None:
    """What the gateway must read it refuses itself; the rest is the engine's to judge, with a code that is a string."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASKED | {"stream": "yes"})
    assert (refused.value.code, refused.value.param) == ("invalid_body", "stream")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASKED | {"max_tokens": 10**7})
    assert refused.value.code == "400"
    assert refused.value.request_id


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("429:7", 429, openai.RateLimitError),
        ("503:7", 503, openai.InternalServerError),
        ("plain:500", 500, openai.InternalServerError),
        ("engine-death", 500, openai.InternalServerError),
        ("hang-up", 502, openai.InternalServerError),
        ("garbage", 502, openai.InternalServerError),
    ],
)
def test_failures_of_the_backend_become_exceptions(
    client: openai.OpenAI, service: Service, fault: str, status: int, kind: type[openai.APIStatusError]
) -> None:
    """The right class, the engine's own Retry-After, and an id that the log knows."""
    with pytest.raises(kind) as failed:
        client.chat.completions.create(**told(fault))
    assert failed.value.status_code == status
    assert failed.value.response.headers.get("retry-after") == ("7" if ":7" in fault else None)
    assert set(failed.value.response.json()["error"]) == {"message", "type", "param", "code"}
    assert service.line(failed.value.request_id)["outcome"] != "ok"


@pytest.mark.parametrize("fault", ["error-frame:3", "truncate:3", "cut-off:3", "reset-after:3"])
def test_a_stream_that_breaks_raises_after_what_came(client: openai.OpenAI, service: Service, fault: str) -> None:
    """The library does not notice by itself that a stream was cut: the gateway says so in its last frame."""
    stream = client.chat.completions.create(**told(fault), stream=True)
    seen = 0
    with pytest.raises(openai.APIError):
        for _ in stream:
            seen += 1
    assert seen == 4  # the role, and three tokens
    assert service.line(stream.response.headers["x-request-id"])["outcome"].startswith("upstream_")


def test_leaving_a_stream_frees_the_backend(client: openai.OpenAI, service: Service) -> None:
    """Closing it after three chunks of many ends it everywhere."""
    with client.chat.completions.create(
        model="m", messages=TURNS, stream=True, max_tokens=100_000, extra_body={"ignore_eos": True}
    ) as stream:
        for _ in range(3):
            next(stream)
    assert service.line(stream.response.headers["x-request-id"])["outcome"] == "client_disconnect"
    service.eventually(service.settled)


def test_a_deadline_of_the_client_frees_the_backend(client: openai.OpenAI, service: Service) -> None:
    """The library gives up waiting for a whole answer and hangs up: nobody goes on working for it."""
    patience = client.with_options(timeout=httpx.Timeout(10, read=0.3))
    before = service.metric("headrace_requests_total", outcome="client_disconnect")
    with pytest.raises(openai.APITimeoutError):
        patience.chat.completions.create(**told("stall"))
    service.eventually(lambda: service.metric("headrace_requests_total", outcome="client_disconnect") > before)
    service.eventually(service.settled)


@pytest.mark.anyio
async def test_fifty_streams_at_once(service: Service) -> None:
    """The asynchronous client; every stream is whole, and all say the same."""
    async with openai.AsyncOpenAI(base_url=f"{service.api}/v1", api_key=KEY, max_retries=0) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(**ASKED, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(streamed() for _ in range(50)))
        whole = await client.chat.completions.create(**ASKED)
    assert set(texts) == {whole.choices[0].message.content}


def test_retries_wait_as_long_as_they_are_told(tmp_path: Path) -> None:
    """A busy backend says when to come again; the answer of the second try is the client's."""
    with ExitStack() as stack:
        pool = {"backends": [{"url": stack.enter_context(busy_once())}], "retries": {"attempts": 0}}
        gateway = started(stack, tmp_path, {"pools": {"p": pool}, "models": {"m": {}}})
        client = stack.enter_context(openai.OpenAI(base_url=f"{gateway.api}/v1", api_key="none", max_retries=2))
        began = time.monotonic()
        raw = client.chat.completions.with_raw_response.create(**ASKED)
        assert time.monotonic() - began >= 1
        assert raw.parse().choices[0].message.content == "now"
        assert raw.retries_taken == 1
        gateway.eventually(lambda: [line["status"] for line in gateway.lines()] == [429, 200])
