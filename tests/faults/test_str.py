"""Streams: what passes, when it passes, and what is counted of it. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, completion, event, healthy, streaming, usage_event
from tests.faults.process import GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio

USAGE = {"stream_options": {"include_usage": True}}
LAG_S = 0.2  # a case allows 100 ms on a machine of its own


class Lockstep:
    """Sends the next piece only when the client has told that it got the last one: whoever holds pieces back hangs."""

    def __init__(self, pieces: Sequence[bytes], pause_s: float = 0.0, **headers: str) -> None:
        self.pieces = pieces
        self.written: list[float] = []
        self._headers = headers
        self._pause_s = pause_s
        self._seen = asyncio.Semaphore(0)

    async def script(self, connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head(**self._headers)
        for piece in self.pieces:
            self.written.append(time.monotonic())
            await connection.chunk(piece)
            await self._seen.acquire()
            await asyncio.sleep(self._pause_s)
        await connection.last_chunk()

    async def read(self, client: RawClient, request: bytes, needles: Sequence[bytes]) -> tuple[Response, list[float]]:
        """The answer, and how long each piece was on its way; `needles[i]` tells that piece i has come."""
        response, lags = Response(), []
        await client.send(request)
        for needle, number in zip(needles, range(len(self.pieces)), strict=True):
            await client.read(response, 10.0, until=needle)
            assert needle in response.body, f"piece {number} is held back"
            lags.append(time.monotonic() - self.written[number])
            self._seen.release()
        await client.read(response)
        return response, lags


async def test_b001_characters_cut_by_segments_arrive_whole(gateway: GatewayProcess, a: Fake) -> None:
    """20 events of CJK, emoji and accents, one byte a segment: the same bytes, and the same counts as unsplit."""
    pieces = [b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % "你好🙂é".encode()] * 20
    stream = b"".join([*pieces, event(finish="stop"), usage_event(), DONE])

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.head(content_type="text/event-stream", content_length=str(len(stream)))
        for position in range(len(stream)):
            await connection.send(stream[position : position + 1])
            await asyncio.sleep(0.0002)

    for number, each in enumerate((script, streaming(stream)), 1):
        await a.play(each)
        response = await ask(gateway.port, chat(stream=True, **USAGE), timeout_s=60.0)
        assert response.body == stream
        assert b"\xef\xbf\xbd" not in response.body
        assert await gateway.metric("headrace_tokens_total", direction="input") == 11 * number
        assert await gateway.metric("headrace_tokens_total", direction="output") == 7 * number
        assert await gateway.metric("headrace_ttft_seconds_count") == number
    await gateway.settled([a], outcomes={"ok": 2})


async def test_b002_usage_cut_anywhere_is_counted(gateway: GatewayProcess, a: Fake) -> None:
    """The final usage event in two chunks, split at each of its offsets: every time 11 and 7 tokens, and its bytes."""
    last = usage_event()
    rest = event("t0") + event(finish="stop")

    async def script(connection: FakeConnection) -> None:
        while True:
            request = await connection.request()
            offset = request.json()["seed"]
            await connection.stream_head()
            await connection.chunk(rest + last[:offset])
            await asyncio.sleep(0.005)
            await connection.chunk(last[offset:] + DONE)
            await connection.last_chunk()

    a.script = script
    offsets = range(1, len(last))
    responses = await asyncio.gather(
        *(ask(gateway.port, chat(stream=True, seed=offset, **USAGE)) for offset in offsets)
    )
    assert {response.body for response in responses} == {rest + last + DONE}
    count = len(offsets)
    assert await gateway.metric("headrace_tokens_total", direction="input") == 11 * count
    assert await gateway.metric("headrace_tokens_total", direction="output") == 7 * count
    await gateway.settled([a], outcomes={"ok": count})


async def test_b003_every_legal_framing_is_metered_alike(gateway: GatewayProcess, a: Fake) -> None:
    """LF, CRLF, CR, `data:` without a space, and a BOM: the bytes pass, the counts are those of the first."""
    events = [event(role="assistant"), *(event(f"t{number}") for number in range(7)), event(finish="stop")]
    lf = b"".join([*events, usage_event(output=9), DONE])
    streams = [lf, lf.replace(b"\n", b"\r\n"), lf.replace(b"\n", b"\r"), lf.replace(b"data: {", b"data:{")]
    for number, stream in enumerate([*streams, b"\xef\xbb\xbf" + lf], 1):
        await a.play(streaming(stream[:200], stream[200:]))
        response = await ask(gateway.port, chat(stream=True, **USAGE))
        assert response.body == stream
        assert await gateway.metric("headrace_tokens_total", direction="output") == 9 * number
        assert await gateway.metric("headrace_ttft_seconds_count") == number
        assert await gateway.metric("headrace_inter_token_seconds_count") == 6 * number
    await gateway.settled([a], outcomes={"ok": 5})


async def test_b006_comments_are_no_tokens(gateway: GatewayProcess, a: Fake) -> None:
    """Three comments 300 ms apart before the first token: they pass as comments, openai-python reads on, and the time
    to the first token includes them."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        for _ in range(3):
            await connection.chunk(b": OPENROUTER PROCESSING\n\n")
            await asyncio.sleep(0.3)
        await connection.chunk(event("hi") + event(finish="stop") + DONE)
        await connection.last_chunk()

    a.script = script
    response = await ask(gateway.port, chat(stream=True))
    assert response.body.startswith(b": OPENROUTER PROCESSING\n\n" * 3)
    assert b"data: :" not in response.body
    assert await gateway.metric("headrace_ttft_seconds_sum") >= 0.9
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["hi", None]
    await gateway.settled([a], outcomes={"ok": 2})


async def test_b007_blocks_without_data_pass(gateway: GatewayProcess, a: Fake) -> None:
    """`retry:`, `id:`, `event:` and an empty `data:` among events: not one is lost, made up, or an error."""
    blocks = (b"retry: 1000\n\n", b"id: 7\n\n", b"event: ping\n\n", b"data:\n\n")
    events = [piece for number, block in enumerate(blocks) for piece in (block, event(f"t{number}"))]
    events += [event(finish="stop"), usage_event(), DONE]
    a.script = streaming(*events)
    response = await ask(gateway.port, chat(stream=True, **USAGE))
    assert response.body == b"".join(events)
    assert await gateway.metric("headrace_parse_errors_total") == 0
    assert await gateway.metric("headrace_tokens_total", direction="output") == 7
    await gateway.settled([a], outcomes={"ok": 1})


async def test_b008_a_huge_event_passes_in_constant_memory(gateway: GatewayProcess, a: Fake) -> None:
    """One event of 8 MiB in pieces of 4 KiB, then small ones: the same bytes, the last of the big event soon after it
    was written, memory flat, and processor time that grows with the size, not its square."""
    written = 0.0

    async def script(connection: FakeConnection) -> None:
        nonlocal written
        while True:
            size = (await connection.request()).json()["seed"]
            await connection.stream_head()
            await connection.chunk(b'data: {"b64":"')
            for _ in range(size // 4096):
                await connection.chunk(b"QUJD" * 1024)
            await connection.chunk(b'"}\n\n')
            written = time.monotonic()
            for data in (event("t0"), event("t1"), event(finish="stop"), DONE):
                await connection.chunk(data)
            await connection.last_chunk()

    a.script = script
    spent = []
    await ask(gateway.port, chat(stream=True, seed=2**20))
    rss = gateway.rss
    for size in (2**22, 2**23):
        begun = gateway.cpu_s
        response = await ask(gateway.port, chat(stream=True, seed=size))
        spent.append(gateway.cpu_s - begun)
        assert response.status == 200
        assert len(response.body) == 14 + size + 4 + len(event("t0") + event("t1") + event(finish="stop") + DONE)
        assert response.body.count(b"QUJD") == size // 4
        assert response.ended_at - written < 1.0
    assert spent[1] < 3 * spent[0] + 0.1
    assert gateway.rss - rss < 64 * 2**20
    await gateway.settled([a], outcomes={"ok": 3})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": False}}, False),
    ],
)
async def test_b009_usage_is_told_to_those_who_asked(
    gateway: GatewayProcess, a: Fake, options: dict[str, object], told: bool
) -> None:
    """The client sees the usage chunk if and only if it asked for it, once, before [DONE]; tokens are counted from the
    engine's numbers in any case."""
    a.script = healthy
    response = await ask(gateway.port, chat(stream=True, **options))
    chunks = response.body.split(b"\n\n")
    assert chunks[-2:] == [b"data: [DONE]", b""]
    with_usage = [number for number, chunk in enumerate(chunks) if b'"usage"' in chunk]
    assert with_usage == ([len(chunks) - 3] if told else [])
    if told:
        assert json.loads(chunks[-3].removeprefix(b"data: "))["choices"] == []
    assert await gateway.metric("headrace_tokens_total", direction="input") == 11
    assert await gateway.metric("headrace_tokens_total", direction="output") == 5
    await gateway.settled([a], outcomes={"ok": 1})


async def test_b010_chunks_without_choices_pass(gateway: GatewayProcess, a: Fake) -> None:
    """No `choices`, an empty one in it, null: forwarded, counted, no fault."""
    last = b'data: {"id":"c-1","usage":{"prompt_tokens":11,"completion_tokens":7}}\n\n'
    events = [b'data: {"choices":[{}]}\n\n', b'data: {"choices":null}\n\n', event("t0"), event(finish="stop"), last]
    a.script = streaming(*events)
    response = await ask(gateway.port, chat(stream=True))
    assert response.body == b"".join(events)
    assert await gateway.metric("headrace_tokens_total", direction="output") == 7
    assert await gateway.metric("headrace_ttft_seconds_count") == 1
    assert await gateway.metric("headrace_parse_errors_total") == 0
    await gateway.settled([a], outcomes={"ok": 1})


@pytest.mark.parametrize(
    "content_type",
    [
        "text/event-stream",
        "text/event-stream; charset=utf-8",
        "Text/Event-Stream;charset=UTF-8",
        'text/event-stream ; charset="utf-8"',
    ],
)
async def test_b011_any_spelling_of_the_type_is_a_stream(gateway: GatewayProcess, a: Fake, content_type: str) -> None:
    """Each event arrives before the next is written; the header stays as the backend wrote it."""
    events = [*(event(f"t{number} ") for number in range(5)), event(finish="stop") + DONE]
    steps = Lockstep(events, content_type=content_type)
    a.script = steps.script
    async with RawClient(gateway.port) as client:
        response, lags = await steps.read(client, chat(stream=True), [*(b"t%d " % n for n in range(5)), DONE])
    assert response.header("content-type") == content_type
    assert response.body == b"".join(events)
    assert sorted(lags)[len(lags) // 2] < LAG_S
    await gateway.settled([a], outcomes={"ok": 1})


@pytest.mark.parametrize("stream", [False, True])
async def test_b012_the_backend_says_what_it_sends(gateway: GatewayProcess, a: Fake, stream: bool) -> None:
    """JSON where a stream was asked for, a stream where JSON was: the type and the bytes are the backend's."""
    body = completion()
    events = event("t0") + event(finish="stop") + usage_event() + DONE

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            if stream:
                await connection.answer(body)
            else:
                await connection.answer(events, content_type="text/event-stream")

    a.script = script
    response = await ask(gateway.port, chat(stream=stream))
    assert response.header("content-type") == ("application/json" if stream else "text/event-stream")
    assert response.body == (body if stream else events)
    assert await gateway.metric("headrace_tokens_total", direction="output") == 7
    await gateway.settled([a], outcomes={"ok": 1})


async def test_b013_events_are_not_collected(gateway: GatewayProcess, a: Fake) -> None:
    """10 events, 20 runs (3 in the ordinary suite): each one, and the head before the second, is at the client before
    the next is written; half of them within 30 ms."""
    events = [*(event(f"t{number} ") for number in range(9)), event(finish="stop") + DONE]
    needles = [*(b"t%d " % number for number in range(9)), DONE]
    lags = []
    for _ in times(20, 3):
        steps = Lockstep(events, pause_s=0.01)
        await a.play(steps.script)
        async with RawClient(gateway.port) as client:
            response, found = await steps.read(client, chat(stream=True), needles)
        assert response.head_at < steps.written[1]
        assert len({at for at, _ in response.pieces}) == len(response.pieces) >= 10
        lags += found
    assert sorted(lags)[len(lags) // 2] < 0.03
    await gateway.settled([a], sent=len(times(20, 3)))


async def test_b014_the_head_forbids_buffering(gateway: GatewayProcess, a: Fake) -> None:
    """`X-Accel-Buffering: no` and a `Cache-Control` with no-cache are there; the backend's own are kept, once."""

    async def own(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head(Cache_Control="no-cache, no-transform", X_Accel_Buffering="no")
        await connection.chunk(event("t0") + event(finish="stop"))
        await connection.last_chunk()

    for script, cache in ((healthy, "no-cache"), (own, "no-cache, no-transform")):
        await a.play(script)
        response = await ask(gateway.port, chat(stream=True))
        assert response.header("x-accel-buffering") == "no"
        assert response.header("cache-control") == cache
    await gateway.settled([a], outcomes={"ok": 2})


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_b014_nginx_in_front_does_not_hold_back(gateway: GatewayProcess, a: Fake, tmp_path: Path) -> None:
    """Through a stock nginx, which buffers by default, each event still arrives before the next is written."""
    events = [*(event(f"t{number} ") for number in range(5)), event(finish="stop") + DONE]
    steps = Lockstep(events)
    a.script = steps.script
    async with nginx(gateway.port, tmp_path) as port, RawClient(port) as client:
        response, _ = await steps.read(client, chat(stream=True), [*(b"t%d " % n for n in range(5)), DONE])
        assert response.body == b"".join(events)
    await gateway.settled([a], outcomes={"ok": 1})


@asynccontextmanager
async def nginx(upstream: int, folder: Path) -> AsyncIterator[int]:
    """A stock nginx in front of a port; gives its own."""
    free = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port: int = free.sockets[0].getsockname()[1]
    free.close()
    await free.wait_closed()
    config = folder / "nginx.conf"
    paths = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"daemon off; error_log {folder}/error.log; pid {folder}/pid; events {{}}"
        f"http {{ access_log off; {paths} server {{ listen 127.0.0.1:{port};"
        f"location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }} }}"
    )
    process = await asyncio.create_subprocess_exec("nginx", "-p", str(folder), "-c", str(config), stderr=-3)
    try:
        for _ in range(200):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield port
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("accepted", ["gzip", "identity", None])
@pytest.mark.parametrize("forced", [False, True])
async def test_b015_compressed_streams_are_undone(
    gateway: GatewayProcess, a: Fake, accepted: str | None, forced: bool
) -> None:
    """A backend that compresses whenever it may, or whether it may or not: the client gets plain events, one by one,
    without a Content-Encoding, and usage is counted."""
    events = [*(event(f"t{number} ") for number in range(5)), event(finish="stop") + usage_event() + DONE]
    squeeze = zlib.compressobj(wbits=31)
    packed = [squeeze.compress(data) + squeeze.flush(zlib.Z_SYNC_FLUSH) for data in events]
    packed[-1] += squeeze.flush()
    steps = Lockstep(packed, content_encoding="gzip") if forced else Lockstep(events)
    a.script = steps.script
    lines = [] if accepted is None else [f"Accept-Encoding: {accepted}"]
    async with RawClient(gateway.port) as client:
        needles = [*(b"t%d " % number for number in range(5)), DONE]
        response, _ = await steps.read(client, chat(*lines, stream=True, **USAGE), needles)
    assert a.requests[0].header("accept-encoding") == "identity"  # so an honest backend does not compress
    assert response.header("content-encoding") is None
    assert response.body == b"".join(events)
    assert await gateway.metric("headrace_tokens_total", direction="output") == 7
    await gateway.settled([a], outcomes={"ok": 1})


async def test_b016_small_events_are_not_held_to_be_compressed(gateway: GatewayProcess, a: Fake) -> None:
    """A client that takes gzip, br and zstd gets each small event before the next is written."""
    events = [*(b'data: {"choices":[{"delta":{"content":"t%d "}}]}\n\n' % number for number in range(5)), DONE]
    steps = Lockstep(events)
    a.script = steps.script
    async with RawClient(gateway.port) as client:
        request = chat("Accept-Encoding: gzip, br, zstd", stream=True)
        response, lags = await steps.read(client, request, [*(b"t%d " % number for number in range(5)), DONE])
    assert response.header("content-encoding") is None
    assert sorted(lags)[len(lags) // 2] < LAG_S
    await gateway.settled([a], sent=1)


async def test_b017_a_finished_stream_is_not_kept_open_by_heartbeats(tmp_path: Path) -> None:
    """A finish reason, then comments for ever: the response ends an idle limit after the last event, as a good one and
    without an error; the upstream request is closed."""
    finished = 0.0

    async def script(connection: FakeConnection) -> None:
        nonlocal finished
        await connection.request()
        await connection.stream_head()
        for number in range(5):
            await connection.chunk(event(f"t{number}"))
        await connection.chunk(event(finish="stop"))
        finished = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            await connection.chunk(b": hb\n\n")

    async with Fake(script) as a, GatewayProcess(pool(a.url, timeouts={"idle": "1s"}), tmp_path) as gateway:
        response = await ask(gateway.port, chat(stream=True))
        assert response.complete
        assert 0.9 < response.ended_at - finished < 2.0 + LAG_S
        assert next(at for at, data in response.pieces if b'"stop"' in data) - finished < LAG_S
        assert b"error" not in response.body
        await gateway.settled([a], outcomes={"ok": 1})


@pytest.mark.parametrize("early", [False, True])
async def test_b018_hanging_up_on_done_is_no_disconnect(gateway: GatewayProcess, a: Fake, early: bool) -> None:
    """Clients close as soon as they have read [DONE], or the usage before it, while the backend still owes its end: 100
    times (30 in the ordinary suite) a good outcome with all tokens."""
    count = len(times(100, 30))

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("t0") + event(finish="stop") + usage_event() + DONE[:-1])
        if early:
            await connection.wait_closed()
        await asyncio.sleep(0.1)
        await connection.chunk(DONE[-1:])
        await asyncio.sleep(0.2)
        await connection.last_chunk()

    async def one() -> None:
        async with RawClient(gateway.port) as client:
            await client.send(chat(stream=True, **USAGE))
            await client.response(until=b'"usage"' if early else b"[DONE]")
            client.close()

    a.script = script
    await asyncio.gather(*(one() for _ in range(count)))
    await gateway.idle([a])
    assert await gateway.metric("headrace_tokens_total", direction="output") == 7 * count
    await gateway.settled([a], outcomes={"ok": count})
