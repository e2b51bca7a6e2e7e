"""Every fault, as a raw socket sees it."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from loadtests.emulator import Emulator, Server, Settings
from loadtests.faults import FAULTS, Told, parse
from tests.loadtests.conftest import RawClient, ask, chat, events

pytestmark = pytest.mark.anyio
TOKENS = 20
# Silence is waited for this long. A fault that is not there answers within a few milliseconds.
SILENCE_S = 0.3


class Struck:
    """One request with a fault on it: `async with Struck(server, "stall") as client`."""

    def __init__(self, server: Server, fault: str, *, stream: bool = True, path: str = "/v1/chat/completions") -> None:
        self.server, self.fault, self.path = server, fault, path
        self.body = chat(stream=stream, max_tokens=TOKENS, ignore_eos=True)

    async def __aenter__(self) -> RawClient:
        self.client = await RawClient.open(self.server)
        self.client.send(self.path, self.body, x_emulate_fault=self.fault)
        return self.client

    async def __aexit__(self, *_: object) -> None:
        self.client.writer.transport.abort()


async def silent(client: RawClient, least: int = 0) -> bytes:
    """What comes until nothing more does, but at least so many tokens; the connection must still be open then."""
    got = b""
    while True:
        try:
            async with asyncio.timeout(SILENCE_S if tokens(got) >= least else 10):
                data = await client.reader.read(65536)
        except TimeoutError:
            return got
        assert data, "the connection was closed"
        got += data


def tokens(raw: bytes) -> int:
    """Tokens in the complete events of a chat stream, cut short or not."""
    return raw.count(b'"content":" ') + sum(raw.count(b'"content":"%c' % letter) for letter in range(97, 123))


def heads(raw: bytes) -> bytes:
    return raw.partition(b"\r\n\r\n")[0]


async def test_every_fault_of_the_table_has_a_test_here() -> None:
    """A new fault needs a line in `TESTED`."""
    assert set(FAULTS) == TESTED


TESTED = {
    "refuse", "reset", "hang-up", "stall", "garbage", "429", "503", "plain", "endless-error", "endless-headers",
    "reset-after-headers", "reset-after", "stall-after-headers", "stall-after", "truncate", "cut-off", "engine-death",
    "error-frame", "huge-event", "bad-utf8", "split-utf8", "drip", "slow", "wrong-length", "gzip", "keep-alive-drop",
}  # fmt: skip


@pytest.mark.parametrize("fault", ["reset", "refuse"])
async def test_a_reset_before_the_head_brings_nothing(server: Server, fault: str) -> None:
    """RST, and not one byte before it."""
    async with Struck(server, fault) as client:
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_hang_up_is_an_orderly_end_of_nothing(server: Server) -> None:
    """FIN before the head."""
    async with Struck(server, "hang-up") as client:
        assert await client.rest() == b""


async def test_a_stall_before_the_head_is_silence(server: Server) -> None:
    """No byte, and the connection stays."""
    async with Struck(server, "stall") as client:
        assert await silent(client) == b""


async def test_garbage_is_no_http(server: Server) -> None:
    """Bytes that no parser takes for a status line."""
    async with Struck(server, "garbage") as client:
        assert not (await client.rest()).startswith(b"HTTP/")


@pytest.mark.parametrize(
    ("fault", "status", "wait"), [("429", 429, "1"), ("429:30", 429, "30"), ("503:2.5", 503, "2.5")]
)
async def test_refusals_say_when_to_come_back(server: Server, fault: str, status: int, wait: str) -> None:
    """The status, vLLM's error body, and Retry-After."""
    async with Struck(server, fault) as client:
        got, headers, raw = await client.answer()
    assert (got, headers["retry-after"]) == (status, wait)
    assert json.loads(raw)["error"]["code"] == status


async def test_a_refusal_can_come_without_retry_after(server: Server) -> None:
    """503:0 leaves the header out."""
    async with Struck(server, "503:0") as client:
        _, headers, _ = await client.answer()
    assert "retry-after" not in headers


async def test_a_plain_error_is_no_json(server: Server) -> None:
    """As a balancer in between answers."""
    async with Struck(server, "plain:504") as client:
        status, headers, raw = await client.answer()
    assert (status, headers["content-type"]) == (504, "text/plain; charset=utf-8")
    assert raw.startswith(b"upstream connect error")


@pytest.mark.parametrize("fault", ["endless-error", "endless-headers"])
async def test_endless_answers_do_not_end(server: Server, emulator: Emulator, fault: str) -> None:
    """A megabyte is read and more keeps coming; a reader that stops costs the emulator a bounded buffer."""
    async with Struck(server, fault) as client:
        raw = await client.reader.readexactly(1_000_000)
        assert heads(raw).startswith(b"HTTP/1.1 500" if fault == "endless-error" else b"HTTP/1.1 200")
        assert (b"\r\n\r\n" in raw) == (fault == "endless-error")
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(SILENCE_S)
        (connection,) = emulator.connections
        assert connection.behind() < 600_000


@pytest.mark.parametrize(("fault", "count"), [("reset-after-headers", 0), ("reset-after:4", 4)])
async def test_a_reset_in_the_stream_comes_after_what_was_sent(server: Server, fault: str, count: int) -> None:
    """The head and exactly that many tokens arrive, then RST."""
    async with Struck(server, fault) as client:
        raw = bytearray()
        with pytest.raises(ConnectionResetError):
            while True:
                raw += await client.reader.read(65536)
    assert heads(bytes(raw)).startswith(b"HTTP/1.1 200")
    assert tokens(bytes(raw)) == count


@pytest.mark.parametrize(("fault", "count"), [("stall-after-headers", 0), ("stall-after:4", 4)])
async def test_a_stall_in_the_stream_is_silence_after_what_was_sent(
    server: Server, emulator: Emulator, fault: str, count: int
) -> None:
    """The tokens come, then nothing; the engine is free meanwhile and the connection open."""
    async with Struck(server, fault) as client:
        assert tokens(await silent(client, count)) == count
        assert emulator.statistics().running == 0


async def test_a_cut_off_stream_ends_on_an_event_without_its_terminator(server: Server) -> None:
    """FIN after four whole events: neither [DONE] nor the last chunk."""
    async with Struck(server, "cut-off:4") as client:
        raw = await client.rest()
    assert tokens(raw) == 4
    assert raw.endswith(b"}\n\n\r\n")
    assert b"[DONE]" not in raw
    assert not raw.endswith(b"0\r\n\r\n")


async def test_a_truncated_stream_ends_inside_an_event(server: Server) -> None:
    """FIN one byte into a chunk that was declared longer."""
    async with Struck(server, "truncate:4") as client:
        await client.head()
        with pytest.raises(asyncio.IncompleteReadError):
            await client.body({})


@pytest.mark.parametrize("fault", ["truncate", "cut-off"])
async def test_a_truncated_whole_answer_is_half_of_it(server: Server, fault: str) -> None:
    """Less than Content-Length says, then FIN."""
    async with Struck(server, fault, stream=False) as client:
        _, headers = await client.head()
        half = await client.rest()
    assert len(half) == int(headers["content-length"]) // 2


async def test_a_reset_can_hit_a_whole_answer_too(server: Server) -> None:
    """RST in the middle of the body."""
    async with Struck(server, "reset-after", stream=False) as client:
        await client.head()
        with pytest.raises(ConnectionResetError):
            await client.rest()


@pytest.mark.parametrize(("fault", "count"), [("engine-death", 0), ("error-frame:4", 4)])
async def test_an_error_frame_ends_the_stream_in_order(
    server: Server, emulator: Emulator, fault: str, count: int
) -> None:
    """As vLLM 0.32 when its engine dies: 200, the tokens so far, an error event, [DONE]; the connection lives on."""
    async with Struck(server, fault) as client:
        status, _, raw = await client.answer()
        client.send("/health", method="GET")
        assert (await client.answer())[0] == 200
    *said, error, done = events(raw)
    assert (status, tokens(raw), done) == (200, count, "[DONE]")
    assert error["error"]["code"] == 500
    assert len(said) == (count + 1 if count else 0)
    assert emulator.statistics().running == 0


async def test_a_fault_on_the_very_last_token_leaves_the_engine_running(server: Server) -> None:
    """The sequence has just ended by itself when the fault lets go of it."""
    async with Struck(server, f"error-frame:{TOKENS - 1}") as client:
        _, _, raw = await client.answer()
        client.send("/v1/chat/completions", chat(max_tokens=2))
        assert (await client.answer())[0] == 200
    assert tokens(raw) == TOKENS - 1


@pytest.mark.parametrize(
    ("path", "event"), [("/v1/messages", b"event: error\n"), ("/v1/responses", b'"type":"error"}\n\n')]
)
async def test_an_error_frame_speaks_the_dialect(server: Server, path: str, event: bytes) -> None:
    """Anthropic and Responses streams have error events of their own, and no [DONE]."""
    struck = Struck(server, "error-frame:2", path=path)
    struck.body |= {"input": "hello"}
    async with struck as client:
        _, _, raw = await client.answer()
    assert event in raw
    assert b"[DONE]" not in raw


async def test_an_engine_death_is_a_500_where_nothing_streams(server: Server) -> None:
    """Whole answers have a status still."""
    async with Struck(server, "engine-death", stream=False) as client:
        status, _, raw = await client.answer()
    assert (status, json.loads(raw)["error"]["type"]) == (500, "InternalServerError")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_huge_event_is_one_event(server: Server, stream: bool) -> None:
    """A token of a megabyte, valid in every other way."""
    async with Struck(server, "huge-event:1000000", stream=stream) as client:
        _, _, raw = await client.answer()
    text = events(raw)[1]["choices"][0]["delta"] if stream else json.loads(raw)["choices"][0]["message"]
    assert len(text["content"]) > 1_000_000


async def test_bad_utf8_is_in_the_text(server: Server) -> None:
    """The stream goes on to its end around bytes that are no UTF-8."""
    async with Struck(server, "bad-utf8") as client:
        _, _, raw = await client.answer()
    with pytest.raises(UnicodeDecodeError):
        raw.decode()
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_split_utf8_cuts_inside_characters(server: Server) -> None:
    """No cut falls between characters, and together the parts are right."""
    async with Struck(server, "split-utf8:20") as client:
        await client.head()
        parts = []
        while size := int(await client.reader.readuntil(b"\r\n"), 16):
            parts.append(await client.reader.readexactly(size + 2))
    with pytest.raises(UnicodeDecodeError):
        parts[0].decode()
    assert "é漢🌊" in b"".join(part[:-2] for part in parts).decode()


async def test_a_drip_is_byte_by_byte(server: Server) -> None:
    """Every body byte is a chunk of its own, and the head comes in pieces."""
    struck = Struck(server, "drip:0", stream=False)
    struck.body |= {"stream": True, "max_tokens": 1}
    async with struck as client:
        await client.head()
        sizes = []
        while size := int(await client.reader.readuntil(b"\r\n"), 16):
            sizes.append(size)
            await client.reader.readexactly(size + 2)
    assert len(sizes) > 100
    assert set(sizes) == {1}


async def test_slow_takes_so_many_times_as_long(server: Server, emulator: Emulator) -> None:
    """The last token of a slowed stream is as much later as was asked for, and none is lost."""
    loop = asyncio.get_running_loop()
    step_s = emulator.engine.profile.decoding_ps(1, 1, 20) / 1e12 / emulator.settings.speed
    start = loop.time()
    async with Struck(server, "slow:20") as client:
        _, _, raw = await client.answer()
    assert tokens(raw) == TOKENS
    assert loop.time() - start > 0.9 * 20 * (TOKENS - 1) * step_s


@pytest.mark.parametrize(("fault", "stream"), [("wrong-length:10", False), ("wrong-length:100000", True)])
async def test_a_length_that_promises_too_much_is_not_kept(server: Server, fault: str, stream: bool) -> None:
    """The body ends before its Content-Length."""
    async with Struck(server, fault, stream=stream) as client:
        _, headers = await client.head()
        body = await client.rest()
    assert len(body) < int(headers["content-length"])
    assert "transfer-encoding" not in headers


async def test_a_length_that_promises_too_little_leaves_bytes_over(server: Server) -> None:
    """More body than its Content-Length."""
    async with Struck(server, "wrong-length:-5", stream=False) as client:
        _, headers = await client.head()
        assert len(await client.rest()) == int(headers["content-length"]) + 5


@pytest.mark.parametrize("stream", [True, False])
async def test_gzip_is_sent_unasked(server: Server, stream: bool) -> None:
    """The body unpacks to the answer, and says that it is packed."""
    async with Struck(server, "gzip", stream=stream) as client:
        _, headers, raw = await client.answer()
    assert headers["content-encoding"] == "gzip"
    plain = gzip.decompress(raw)
    assert events(plain)[-1] == "[DONE]" if stream else json.loads(plain)["object"] == "chat.completion"


async def test_a_kept_connection_is_dropped_unannounced(server: Server) -> None:
    """A good answer that promises nothing about closing, then FIN."""
    async with Struck(server, "keep-alive-drop", stream=False) as client:
        _, headers, raw = await client.answer()
        assert json.loads(raw)["object"] == "chat.completion"
        assert "connection" not in headers
        assert await client.rest() == b""


async def test_a_server_can_refuse_connections() -> None:
    """The port is taken, and nobody listens there."""
    async with Emulator(Settings(faults=(parse("refuse"),))).serve() as server:
        with pytest.raises(ConnectionRefusedError):
            await RawClient.open(server)


async def test_a_rate_strikes_that_share_of_requests() -> None:
    """Of 200 requests at 0.25 about 50 fail, the same ones for the same seed."""

    async def struck() -> list[int]:
        async with Emulator(Settings(faults=(parse("503@0.25"),), seed=3)).serve() as server:
            return [(await ask(server, "/tokenize", {"prompt": "a"}))[0] for _ in range(200)]

    found = await struck()
    assert 30 < found.count(503) < 70
    assert found.count(200) == 200 - found.count(503)
    assert await struck() == found


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("stall", Told("stall", 0)),
        ("reset-after:7", Told("reset-after", 7)),
        ("503:1.5@0.1", Told("503", 1.5, 0.1)),
        ("wrong-length:-3", Told("wrong-length", -3)),
    ],
)
async def test_a_fault_is_told_as_name_argument_and_rate(spec: str, told: Told) -> None:
    """NAME[:ARG][@RATE]; what is left out has a default."""
    assert parse(spec) == told


@pytest.mark.parametrize("spec", ["nope", "stall:", "stall:x", "stall@2", "stall@.5:1", ""])
async def test_what_is_no_fault_is_refused_with_the_list(server: Server, spec: str) -> None:
    """At the start by an error, in a request by a 400."""
    with pytest.raises(ValueError, match="keep-alive-drop"):
        parse(spec)
    if spec:
        status, found = await ask(server, "/v1/chat/completions", chat(), x_emulate_fault=spec)
        assert status == 400
        assert "keep-alive-drop" in found["error"]["message"]


async def test_a_fault_of_one_request_leaves_the_next_alone(server: Server) -> None:
    """On the same connection, after an orderly fault."""
    async with Struck(server, "429") as client:
        assert (await client.answer())[0] == 429
        client.send("/v1/chat/completions", chat(max_tokens=1))
        assert (await client.answer())[0] == 200
