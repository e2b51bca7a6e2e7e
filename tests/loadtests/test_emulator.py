"""The emulator as an API: what it answers, what it counts, what it refuses, and what it lets go."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from loadtests.emulator import Emulator, Server, Settings
from tests.loadtests.conftest import LONG, RawClient, ask, chat, events

pytestmark = pytest.mark.anyio


async def settled(holds: Callable[[], bool]) -> None:
    """Wait until it holds; fail after five seconds."""
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.002)


async def test_the_same_prompt_and_seed_give_the_same_text(server: Server) -> None:
    """Answers depend on the prompt, the seed and the choice, on nothing else."""
    _, one = await ask(server, "/v1/chat/completions", chat(n=2, seed=1))
    _, two = await ask(server, "/v1/chat/completions", chat(n=2, seed=1))
    _, other = await ask(server, "/v1/chat/completions", chat(n=2, seed=2))
    texts = [[choice["message"]["content"] for choice in found["choices"]] for found in (one, two, other)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert texts[0] != texts[2]
    assert one["id"] != two["id"]


async def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    """The deltas add up to the text, the finish reason and the usage of the same request without a stream."""
    async with await RawClient.open(server) as client:
        client.send("/v1/chat/completions", chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
        status, headers, raw = await client.answer()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    role, *deltas, usage, done = events(raw)
    _, whole = await ask(server, "/v1/chat/completions", chat(max_tokens=40))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(delta["choices"][0]["delta"]["content"] for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert deltas[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(deltas) == whole["usage"]["completion_tokens"]
    assert done == "[DONE]"


async def test_usage_is_in_a_stream_only_when_it_is_asked_for(server: Server) -> None:
    """No chunk mentions usage otherwise, and none has empty choices."""
    for options in ({}, {"stream_options": {"include_usage": False}}):
        _, raw = await ask(server, "/v1/chat/completions", chat(max_tokens=5, stream=True, **options))
        assert b"usage" not in raw
        assert all(event == "[DONE]" or event["choices"] for event in events(raw))
    _, raw = await ask(server, "/v1/chat/completions", chat(max_tokens=5, stream=True, stream_options={}))
    assert b"usage" in raw  # so vLLM reads an empty object


async def test_a_repeated_prompt_is_found_in_the_cache_but_not_across_salts(server: Server) -> None:
    """Full blocks of 16 tokens are hit the second time under the same salt, never under another."""

    async def cached(salt: str | None) -> int:
        _, found = await ask(server, "/v1/chat/completions", chat(LONG, max_tokens=2, cache_salt=salt))
        usage = found["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert await cached("a") == 0
    assert await cached("a") > 400
    assert await cached("b") == 0
    assert await cached(None) == 0
    assert await cached("b") > 400


async def test_the_next_turn_finds_prompt_and_answer_in_the_cache(server: Server) -> None:
    """A conversation grows: the engine has computed its own answer and does not compute it again."""
    turns = [{"role": "user", "content": LONG}]
    _, first = await ask(
        server, "/v1/chat/completions", {"model": "m", "messages": turns, "max_tokens": 400, "seed": 5}
    )
    assert first["choices"][0]["finish_reason"] == "stop", "choose a seed whose answer ends by itself"
    said = first["choices"][0]["message"]
    turns += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "And then?"}]
    _, second = await ask(server, "/v1/chat/completions", {"model": "m", "messages": turns, "max_tokens": 2})
    known = first["usage"]["total_tokens"]
    assert known - 32 <= second["usage"]["prompt_tokens_details"]["cached_tokens"] <= known


async def test_lengths_are_what_was_asked(server: Server) -> None:
    """max_tokens cuts with `length`; ignore_eos goes on to it; without it an answer may end with `stop` before."""
    for fields, tokens in (({"max_tokens": 7, "ignore_eos": True}, 7), ({"max_completion_tokens": 3}, 3)):
        _, found = await ask(server, "/v1/chat/completions", chat(**fields))
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == tokens
    _, found = await ask(server, "/v1/chat/completions", chat(max_tokens=100_000))
    assert found["choices"][0]["finish_reason"] == "stop"


async def test_a_forced_tool_is_called_with_arguments_that_fit(server: Server) -> None:
    """The streamed pieces of the arguments are one JSON object with what the schema requires."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    fields = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    _, whole = await ask(server, "/v1/chat/completions", chat(**fields))
    _, raw = await ask(server, "/v1/chat/completions", chat(**fields, stream=True))
    call = whole["choices"][0]["message"]["tool_calls"][0]
    deltas = [event["choices"][0] for event in events(raw) if event != "[DONE]"]
    pieces = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert pieces[0]["function"]["name"] == call["function"]["name"] == "weather"
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    assert deltas[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
    _, free = await ask(server, "/v1/chat/completions", chat(tools=tools, tool_choice="auto"))
    assert free["choices"][0]["message"]["content"]


async def test_completions_take_texts_and_tokens(server: Server) -> None:
    """Two prompts and n = 2 are four choices; the tokens of a text are the text."""
    _, found = await ask(server, "/v1/completions", {"model": "m", "prompt": ["one", "two"], "n": 2, "max_tokens": 3})
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["completion_tokens"] == 12
    _, tokens = await ask(server, "/tokenize", {"model": "m", "prompt": "one is é"})
    _, text = await ask(server, "/detokenize", {"model": "m", "tokens": tokens["tokens"]})
    assert text == {"prompt": "one is é"}
    prompts = ("one is é", tokens["tokens"])
    answers = [await ask(server, "/v1/completions", {"model": "m", "prompt": prompt}) for prompt in prompts]
    assert answers[0][1]["choices"] == answers[1][1]["choices"]


REFUSED: list[tuple[str, Any, int, str, str | None]] = [
    ("/v1/chat/completions", {"model": "nope", "messages": [{}]}, 404, "NotFoundError", "model"),
    ("/v1/chat/completions", chat(max_tokens=10**6), 400, "BadRequestError", "max_tokens"),
    ("/v1/chat/completions", chat(temperature=-1), 400, "BadRequestError", "temperature"),
    ("/v1/chat/completions", chat(stream_options={}), 400, "BadRequestError", "stream_options"),
    ("/v1/chat/completions", chat("long " * 120_000), 400, "BadRequestError", "input_tokens"),
    ("/v1/chat/completions", {"model": "m"}, 400, "Bad Request", "body.messages"),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "x"}]}, 400, "Bad Request", "body.messages.0.role"),
    ("/v1/chat/completions", b'{"model":', 400, "Bad Request", "body.1"),
    (
        "/v1/chat/completions",
        chat(tools=[{"name": "a"}], tool_choice={"name": "b"}),
        400,
        "BadRequestError",
        "tool_choice",
    ),
    ("/v1/completions", {"model": "m", "prompt": ""}, 400, "BadRequestError", "prompt"),
    ("/v1/embeddings", {"model": "m", "input": []}, 400, "BadRequestError", "input"),
    ("/v1/score", {"text_1": 5, "text_2": [{}]}, 400, "Bad Request", "body.text_1"),
    ("/v1/rerank", {"query": "a", "documents": 5}, 400, "Bad Request", "body."),
    ("/detokenize", {"model": "m", "tokens": [2**40]}, 400, "BadRequestError", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "kind", "param"), REFUSED)
async def test_refusals_have_vllms_shape(
    server: Server, path: str, body: Any, status: int, kind: str, param: str | None
) -> None:
    """All four keys, the integer code, and the type and parameter that vLLM names."""
    got, found = await ask(server, path, body)
    assert got == status
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert (found["error"]["type"], found["error"]["param"], found["error"]["code"]) == (kind, param, status)


async def test_an_anthropic_refusal_has_anthropics_shape(server: Server) -> None:
    """The messages API speaks its own errors."""
    status, found = await ask(server, "/v1/messages", {"model": "nope", "max_tokens": 1, "messages": []})
    assert (status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")


async def test_unknown_paths_and_methods_are_refused_as_fastapi_does(server: Server) -> None:
    """404 and 405 with a `detail`."""
    assert await ask(server, "/v1/nothing", {}) == (404, {"detail": "Not Found"})
    assert await ask(server, "/v1/completions", method="GET") == (405, {"detail": "Method Not Allowed"})


async def test_models_health_and_version_are_there(server: Server) -> None:
    """Aliases with a slash included; /health is an empty 200."""
    _, found = await ask(server, "/v1/models", method="GET")
    assert [card["id"] for card in found["data"]] == ["m", "gpt-4o", "org/name"]
    assert (await ask(server, "/v1/models/org/name", method="GET"))[1]["max_model_len"] == 131072
    assert (await ask(server, "/v1/models/nope", method="GET"))[0] == 404
    assert await ask(server, "/health", method="GET") == (200, b"")
    assert await ask(server, "/load", method="GET") == (200, {"server_load": 0})


async def test_embeddings_are_the_same_for_the_same_text_in_both_encodings(server: Server) -> None:
    """A unit vector, as floats or packed."""
    _, plain = await ask(server, "/v1/embeddings", {"model": "m", "input": ["a", "b", "a"], "dimensions": 8})
    one, two, three = (row["embedding"] for row in plain["data"])
    assert one == three != two
    assert sum(x * x for x in one) == pytest.approx(1)
    _, packed = await ask(
        server, "/v1/embeddings", {"model": "m", "input": "a", "dimensions": 8, "encoding_format": "base64"}
    )
    assert struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"])) == pytest.approx(one)
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] == 3


async def test_rerank_and_score_put_the_likest_first(server: Server) -> None:
    """More tokens in common, more relevant; top_n cuts."""
    documents = ["oil lamp", "the dam holds the water", "water"]
    _, found = await ask(server, "/v1/rerank", {"query": "the dam holds", "documents": documents, "top_n": 2})
    assert found["results"][0]["index"] == 1
    assert len(found["results"]) == 2
    _, scored = await ask(server, "/v1/score", {"text_1": "the dam holds", "text_2": documents})
    scores = [row["score"] for row in scored["data"]]
    assert max(scores) == scores[1]


async def test_sound_and_images_come_and_go(server: Server) -> None:
    """Speech is a WAV file; read back through a form, with the model after the file, it is as many tokens of text."""
    async with await RawClient.open(server) as client:
        client.send("/v1/audio/speech", {"model": "m", "input": "eight characters", "voice": "alloy"})
        _, headers, wav = await client.answer()
    assert (headers["content-type"], wav[:4], wav[8:12]) == ("audio/wav", b"RIFF", b"WAVE")
    assert len(wav) == 44 + struct.unpack("<I", wav[40:44])[0]
    form = b"".join(
        b'--xx\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % part
        for part in ((b"file", b'; filename="a.wav"\r\nContent-Type: audio/wav', wav), (b"model", b"", b"m"))
    )
    kind = 'multipart/form-data; boundary="xx"'
    status, heard = await ask(server, "/v1/audio/transcriptions", form + b"--xx--\r\n", content_type=kind)
    assert (status, len(heard["text"])) == (200, 15)  # four tokens without the leading space
    _, images = await ask(server, "/v1/images/generations", {"model": "m", "prompt": "a dam", "n": 2})
    assert [base64.b64decode(image["b64_json"])[:4] for image in images["data"]] == [b"\x89PNG"] * 2


async def test_metrics_have_vllms_names_and_count(server: Server, emulator: Emulator) -> None:
    """The names and labels that gateways scrape, in numbers that fit what was asked."""
    for _ in range(2):
        await ask(server, "/v1/chat/completions", chat(LONG, max_tokens=10, ignore_eos=True))
    _, raw = await ask(server, "/metrics", method="GET")
    samples = dict(line.rsplit(" ", 1) for line in raw.decode().splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="m"}'
    assert samples[f"vllm:generation_tokens_total{labels}"] == "20.0"
    assert samples[f"vllm:num_requests_running{labels}"] == samples[f"vllm:num_requests_waiting{labels}"] == "0.0"
    assert samples[f"vllm:kv_cache_usage_perc{labels}"] == "0.0"
    assert samples[f"vllm:time_to_first_token_seconds_count{labels}"] == "2.0"
    assert samples[f"vllm:inter_token_latency_seconds_count{labels}"] == "18.0"
    assert samples[f"vllm:e2e_request_latency_seconds_count{labels}"] == "2.0"
    assert samples[f"vllm:request_queue_time_seconds_count{labels}"] == "2.0"
    assert samples['vllm:request_success_total{engine="0",model_name="m",finished_reason="length"}'] == "2.0"
    hits, queries = (float(samples[f"vllm:prefix_cache_{name}_total{labels}"]) for name in ("hits", "queries"))
    assert 400 < hits < queries / 2
    assert any(name.startswith("vllm:cache_config_info") and 'block_size="16"' in name for name in samples)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_place(server: Server, emulator: Emulator, stream: bool) -> None:
    """Streamed or not, all its sequences leave the engine, and the abort is counted."""
    async with await RawClient.open(server) as client:
        client.send("/v1/chat/completions", chat(stream=stream, n=3, ignore_eos=True))
        await settled(lambda: emulator.statistics().running == 3)
    await settled(lambda: emulator.statistics().running == 0)
    assert emulator.gauges.finished["abort"] == 3
    assert not emulator.live.places
    await settled(lambda: emulator.statistics().connections == 0)


async def test_the_pace_is_the_models_also_after_a_pause() -> None:
    """Fifty tokens take fifty steps of the profile; time that passed without work is not made up for."""
    loop = asyncio.get_running_loop()
    slow = Emulator(Settings(speed=2))
    step_s = slow.engine.profile.decoding_ps(1, 1, 20) / 1e12 / 2
    async with slow.serve() as server:
        for tokens, pause_s in ((50, 0.04), (20, 0.04)):
            start = loop.time()
            await ask(server, "/v1/chat/completions", chat(max_tokens=tokens, ignore_eos=True))
            took_s = loop.time() - start
            assert (tokens - 1) * step_s < took_s < 2
            await asyncio.sleep(pause_s)  # less than what the engine would take for being late


async def test_more_than_fits_waits_and_is_served_in_order(emulator: Emulator) -> None:
    """With room for two sequences the third waits, visibly, and is answered afterwards."""
    narrow = Emulator(Settings(speed=20, max_seqs=2))
    async with narrow.serve() as server, asyncio.TaskGroup() as group:
        body = chat(max_tokens=200, ignore_eos=True)
        asked = [group.create_task(ask(server, "/v1/chat/completions", body)) for _ in range(3)]
        await settled(lambda: narrow.statistics().waiting == 1)
        assert narrow.statistics().running == 2
        answers = await asyncio.gather(*asked)
    assert [found["usage"]["completion_tokens"] for _, found in answers] == [200] * 3


async def test_everything_ends_with_the_block() -> None:
    """Leaving `serve` closes the port and the connections, with a stream open."""
    emulator = Emulator(Settings())
    async with emulator.serve() as server:
        client = await RawClient.open(server)
        client.send("/v1/chat/completions", chat(stream=True, ignore_eos=True))
        await client.head()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await client.body({})
    with pytest.raises(ConnectionError):
        await RawClient.open(server)
    client.writer.close()
    assert not emulator.live.places
