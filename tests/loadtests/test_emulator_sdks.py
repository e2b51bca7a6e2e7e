"""The official SDKs against the emulator: every dialect's stream is what they parse, and usage adds up."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest

from loadtests.emulator import Server
from tests.loadtests.conftest import LONG

pytestmark = pytest.mark.anyio

TURNS = [{"role": "user", "content": "How does the water reach the turbine?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(server: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


async def test_openai_chat_whole_and_streamed_agree(client: openai.AsyncOpenAI) -> None:
    """Text, finish reason and usage are the same both ways."""
    whole = await client.chat.completions.create(model="m", messages=TURNS, max_tokens=30)
    stream = await client.chat.completions.create(
        model="m", messages=TURNS, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens == whole.usage.total_tokens


async def test_openai_tool_call_streams_to_arguments(client: openai.AsyncOpenAI) -> None:
    """The SDK's own accumulator puts the call together."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    async with client.chat.completions.stream(model="m", messages=TURNS, tools=tools, tool_choice="required") as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert done[0].name == "weather"
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls[0].function.arguments == done[0].arguments


async def test_openai_completions_stream(client: openai.AsyncOpenAI) -> None:
    """Text completions, two prompts interleaved."""
    stream = await client.completions.create(model="m", prompt=["one", "two"], max_tokens=5, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert all(len(text) == 20 for text in texts.values())


async def test_openai_responses_whole_and_streamed_agree(client: openai.AsyncOpenAI) -> None:
    """The events are numbered without a gap, the deltas are the text, and a cut answer is incomplete."""
    whole = await client.responses.create(model="m", input="hello", max_output_tokens=12)
    stream = await client.responses.create(model="m", input="hello", max_output_tokens=12, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1]
    assert final.type == "response.completed"
    assert "".join(deltas) == whole.output_text == final.response.output_text
    assert final.response.status == whole.status == "incomplete"
    assert final.response.usage is not None
    assert final.response.usage.output_tokens == 12


async def test_openai_responses_function_call(client: openai.AsyncOpenAI) -> None:
    """A forced function is an output item with arguments."""
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    async with client.responses.stream(
        model="m", input="hello", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output[0].type == "function_call"
    assert "city" in final.output[0].arguments


async def test_openai_cached_tokens_grow(client: openai.AsyncOpenAI) -> None:
    """`cached_tokens` of the second request is most of the prompt."""
    turns = [{"role": "user", "content": LONG}]
    usages = [(await client.chat.completions.create(model="m", messages=turns, max_tokens=1)).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[0] == 0
    assert cached[1] > 400


async def test_openai_embeddings_models_and_images(client: openai.AsyncOpenAI) -> None:
    """The SDK asks for packed embeddings and unpacks them."""
    found = await client.embeddings.create(model="m", input=["a", "b"], dimensions=16)
    assert [len(row.embedding) for row in found.data] == [16, 16]
    assert [model.id async for model in client.models.list()] == ["m", "gpt-4o", "org/name"]
    assert (await client.models.retrieve("org/name")).id == "org/name"
    images = await client.images.generate(model="m", prompt="a dam")
    assert images.data is not None
    assert images.data[0].b64_json


async def test_openai_speech_and_transcription(client: openai.AsyncOpenAI) -> None:
    """Speech streams bytes; a transcription takes a form."""
    async with client.audio.speech.with_streaming_response.create(model="m", voice="alloy", input="hello you") as sound:
        wav = await sound.read()
    heard = await client.audio.transcriptions.create(model="m", file=("a.wav", io.BytesIO(wav)))
    assert len(heard.text) > 3


async def test_openai_errors_become_the_right_exceptions(client: openai.AsyncOpenAI) -> None:
    """404, 400, 429 and 503."""
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=TURNS)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="m", messages=TURNS, max_tokens=10**7)
    with pytest.raises(openai.RateLimitError) as limited:
        await client.chat.completions.create(model="m", messages=TURNS, extra_headers={"x-emulate-fault": "429:7"})
    assert limited.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=TURNS, extra_headers={"x-emulate-fault": "503"})


async def test_openai_sees_an_error_frame_as_an_api_error(client: openai.AsyncOpenAI) -> None:
    """An engine that dies in mid-stream raises after the tokens that came."""
    stream = await client.chat.completions.create(
        model="m", messages=TURNS, stream=True, extra_headers={"x-emulate-fault": "error-frame:3"}
    )
    seen = 0
    with pytest.raises(openai.APIError, match="EngineCore"):
        async for _ in stream:
            seen += 1
    assert seen == 4  # the role, and three tokens


async def test_anthropic_messages_whole_and_streamed_agree(claude: anthropic.AsyncAnthropic) -> None:
    """Text, stop reason and usage; input tokens are there from the start."""
    whole = await claude.messages.create(model="m", messages=TURNS, max_tokens=20, system="Be brief.")
    async with claude.messages.stream(model="m", messages=TURNS, max_tokens=20, system="Be brief.") as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = await claude.messages.count_tokens(model="m", messages=TURNS, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens == final.usage.input_tokens


async def test_anthropic_tool_use_streams_to_input(claude: anthropic.AsyncAnthropic) -> None:
    """A forced tool is a block with parsed input, streamed or whole."""
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked = {"model": "m", "messages": TURNS, "max_tokens": 100, "tools": tools, "tool_choice": {"type": "any"}}
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert whole.content[0].input == final.content[0].input
    assert set(final.content[0].input) == {"city"}


async def test_anthropic_errors_become_the_right_exceptions(claude: anthropic.AsyncAnthropic) -> None:
    """A model that is not there, and an engine that dies in mid-stream."""
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="nope", messages=TURNS, max_tokens=1)
    with pytest.raises(anthropic.APIStatusError, match="EngineCore"):
        async with claude.messages.stream(
            model="m", messages=TURNS, max_tokens=50, extra_headers={"x-emulate-fault": "error-frame:2"}
        ) as stream:
            async for _ in stream:
                pass
