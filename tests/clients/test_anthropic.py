"""Anthropic's official Python library, through a gateway process: only `base_url` and `api_key` are ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import KEY, SCHEMA, TURNS
from tests.service import Service

ASKED: dict[str, Any] = {"model": "m", "messages": TURNS, "max_tokens": 20, "system": "Be brief."}


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.api, api_key=KEY, max_retries=0) as client:
        yield client


def told(fault: str) -> dict[str, Any]:
    """The same question to a backend that fails."""
    return ASKED | {"extra_headers": {"x-emulate-fault": fault}}


def test_messages_whole_and_streamed_agree(client: anthropic.Anthropic, service: Service) -> None:
    """Text, stop reason and usage; and the log knows the id that the library gives."""
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
        streamed_id = stream.request_id
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    for request_id in (whole._request_id, streamed_id):
        logged = service.line(request_id)
        assert logged["tokens_out"] == whole.usage.output_tokens
        assert logged["outcome"] == "ok"


def test_the_raw_response_is_there(client: anthropic.Anthropic) -> None:
    """The id stands under Anthropic's name and under ours."""
    raw = client.messages.with_raw_response.create(**ASKED)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert raw.parse().content


def test_a_key_as_bearer_token_is_a_key(service: Service) -> None:
    """The library's `auth_token` goes out as `Authorization`."""
    with anthropic.Anthropic(base_url=service.api, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(**ASKED).content


def test_tools_stream_to_input(client: anthropic.Anthropic) -> None:
    """A forced tool is a block with parsed input, streamed or whole."""
    asked: dict[str, Any] = ASKED | {"tools": [{"name": "weather", "input_schema": SCHEMA}], "max_tokens": 100}
    asked["tool_choice"] = {"type": "any"}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert whole.content[0].input == final.content[0].input
    assert set(final.content[0].input) == {"city"}


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    """`count_tokens` says before what the usage says after."""
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "What nobody asked before."}]}
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == client.messages.create(**asked, max_tokens=1).usage.input_tokens


def test_a_wrong_key_is_an_authentication_error(service: Service) -> None:
    """In Anthropic's shape, with an id to ask about."""
    wrong = anthropic.Anthropic(base_url=service.api, api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(**ASKED)
    assert refused.value.type == "authentication_error"
    assert refused.value.request_id


def test_bad_requests_are_told_by_gateway_and_engine(client: anthropic.Anthropic) -> None:
    """A model that this tenant may not see, a body that the gateway cannot read, and one that the engine refuses."""
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**ASKED | {"model": "hidden"})
    assert refused.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASKED, extra_body={"stream": "yes"})
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASKED | {"max_tokens": 10**7}, timeout=60)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id


@pytest.mark.parametrize(
    ("fault", "status", "kind", "type_"),
    [
        ("429:7", 429, anthropic.RateLimitError, "rate_limit_error"),
        ("503:7", 503, anthropic.InternalServerError, "overloaded_error"),
        ("plain:500", 500, anthropic.InternalServerError, "api_error"),
        ("hang-up", 502, anthropic.InternalServerError, "api_error"),
    ],
)
def test_failures_of_the_backend_become_exceptions(
    client: anthropic.Anthropic, fault: str, status: int, kind: type[anthropic.APIStatusError], type_: str
) -> None:
    """The right class and type, and an id to ask about."""
    with pytest.raises(kind) as failed:
        client.messages.create(**told(fault))
    assert failed.value.status_code == status
    assert failed.value.response.json()["error"]["type"] == type_
    assert failed.value.request_id


@pytest.mark.parametrize("fault", ["error-frame:3", "cut-off:3"])
def test_a_stream_that_breaks_raises_after_what_came(client: anthropic.Anthropic, service: Service, fault: str) -> None:
    """By an error event of the engine's, or of the gateway's where the engine said nothing."""
    text = ""
    with pytest.raises(anthropic.APIStatusError), client.messages.stream(**told(fault)) as stream:
        for piece in stream.text_stream:
            text += piece
    assert text
    assert service.line(stream.request_id)["outcome"].startswith("upstream_")


def test_leaving_a_stream_frees_the_backend(client: anthropic.Anthropic, service: Service) -> None:
    """Closing it after a few words of many ends it everywhere."""
    asked = ASKED | {"max_tokens": 100_000}
    with client.messages.stream(**asked, extra_body={"ignore_eos": True}, timeout=60) as stream:
        for _ in range(3):
            next(stream.text_stream)
    service.eventually(lambda: service.metric("headrace_requests_total", outcome="client_disconnect") >= 1)
    service.eventually(service.settled)
