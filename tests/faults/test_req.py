"""Request bodies: large, odd, broken, compressed. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gateway.wire import ENDPOINTS
from tests.faults.fakes import Fake, FakeConnection, completion, healthy
from tests.faults.process import DIGEST, KEY, GatewayProcess, pool
from tests.faults.rawclient import RawClient, ask, chat, post

pytestmark = pytest.mark.anyio

MIB = 2**20
LIMIT = 24 * MIB
BUFFERED = 64 * MIB
LONG = "a-rather-long-name-for-a-model"
UPSTREAM_NAMES = {"short": "meta-llama/Meta-Llama-3-8B-Instruct", LONG: "s", "中文模型": "z"}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Bodies up to 24 MiB, 64 MiB of them at once, and models that the backends call otherwise."""
    models = {name: {"pool": "p", "upstream_name": upstream} for name, upstream in UPSTREAM_NAMES.items()}
    return {"models": models, "server": {"max_body": "24MiB", "max_buffered": "64MiB"}}


def chunked(body: bytes, path: str = "/v1/chat/completions", *lines: str, size: int = 1000) -> bytes:
    """A POST whose body comes in chunks."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    data = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return post(data, path, "Transfer-Encoding: chunked", *lines)


def sized(size: int) -> bytes:
    """A chat request of so many bytes, most of them an image."""
    head = b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,'
    tail = b'"}}]}]}'
    return head + b"A" * (size - len(head) - len(tail)) + tail


async def stall(gateway: GatewayProcess, *, until: asyncio.Task[Any]) -> float:
    """The longest time that liveness took while something went on."""
    longest = 0.0
    while not until.done():
        begun = time.monotonic()
        assert (await gateway.get("/livez")).status_code == 200
        longest = max(longest, time.monotonic() - begun)
        await asyncio.sleep(0.01)
    return longest


@pytest.mark.parametrize("model", ["m", "short"])
async def test_b109_lone_surrogates_are_forwarded(gateway: GatewayProcess, a: Fake, model: str) -> None:
    """An escaped half of a pair is legal JSON: 200, and byte for byte at the backend, alias or not."""
    body = b'{"model":"%b","messages":[{"role":"user","content":"\\ud83d \\udE00\\uD83D\\uDE00"}]}' % model.encode()
    assert (await ask(gateway.port, post(body))).status == 200
    assert a.requests[0].body == body.replace(b'"short"', json.dumps(UPSTREAM_NAMES["short"]).encode())
    await gateway.settled([a], sent=1)


MALFORMED = {
    "cut": sized(20 * MIB)[:-3],
    "pairs": b'{"model":"m","x":"' + rb"\ud83d\ude00" * (20 * MIB // 12),
    "half pairs": b'{"model":"m","x":"' + rb"\ud83d" * (20 * MIB // 6) + b'"}',
    "escapes": b'{"model":"m","x":"' + rb"\\" * (10 * MIB),
    "a key": b'{ "' + rb"\n" * (10 * MIB) + b'":1}x',
    "brackets": b'{"model":"m","x":' + b"[" * (20 * MIB),
    "blanks": b'{"model":"m"' + b" " * (20 * MIB) + b"]",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_b109_large_malformed_bodies_are_cheap(gateway: GatewayProcess, a: Fake, kind: str) -> None:
    """20 MiB that are no JSON, each bad for another reason: 400 within 300 ms of the gateway's time, and liveness
    never waits long for it."""
    request, cpu = post(MALFORMED[kind]), gateway.cpu_s
    asking = asyncio.create_task(ask(gateway.port, request))
    longest = await stall(gateway, until=asking)
    response = await asking
    assert (response.status, response.error()["code"]) == (400, "invalid_body")
    assert gateway.cpu_s - cpu < 0.6
    assert longest < 0.4
    assert a.hits == 0
    await gateway.settled([a], sent=1)


ODD = '{ "model" : "m",\n\t"messages":[{"role":"user","content":"\\u00e9 é","x":[1.0,1, 1E5]}] ,"b":1,"a":2}'.encode()


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_b110_bytes_and_length_agree(gateway: GatewayProcess, a: Fake, framing: str) -> None:
    """White space, both ways to write é, 1.0 and 1, the order of keys: the same bytes, one length, no chunks."""
    assert (await ask(gateway.port, post(ODD) if framing == "length" else chunked(ODD, size=7))).status == 200
    request = a.requests[0]
    assert request.body == ODD
    assert request.header("content-length") == str(len(ODD))
    assert request.header("transfer-encoding") is None
    await gateway.settled([a], sent=1)


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("name", UPSTREAM_NAMES)
async def test_b111_a_new_name_moves_nothing_else(gateway: GatewayProcess, a: Fake, name: str, framing: str) -> None:
    """Longer or shorter: only the model changes, the length is right, and the Host is the backend's."""
    body = ODD.replace(b'"m"', json.dumps(name, ensure_ascii=False).encode())
    lines = ["Host: evil.example"]
    request = post(body, "/v1/chat/completions", *lines) if framing == "length" else chunked(body, size=11)
    request = request.replace(b"Host: gateway\r\n", b"" if framing == "length" else b"Host: evil.example\r\n")
    assert (await ask(gateway.port, request)).status == 200
    arrived = a.requests[0]
    assert arrived.body == ODD.replace(b'"m"', json.dumps(UPSTREAM_NAMES[name]).encode())
    assert arrived.header("content-length") == str(len(arrived.body))
    assert arrived.header("transfer-encoding") is None
    assert arrived.header("host") == f"127.0.0.1:{a.port}"
    await gateway.settled([a], sent=1)


SIZES = [64 * 1024, 128 * 1024, MIB]
EDGES = [size + step for size in SIZES for step in (-1, 0, 1)] + [6 * MIB]


@pytest.mark.parametrize("dribbled", [False, True])
async def test_b112_large_bodies_arrive_whole(gateway: GatewayProcess, a: Fake, dribbled: bool) -> None:
    """Around every power of two and up to the limit, at once or in pieces of 1 KiB: the same digest."""
    async with RawClient(gateway.port) as client:
        for size in [*EDGES, LIMIT - 1, LIMIT]:
            body = sized(size)
            request = post(body)
            step = 1024 if dribbled and size <= 6 * MIB else 64 * 1024 if dribbled else len(request)
            for start in range(0, len(request), step):
                await client.send(request[start : start + step])
            assert (await client.response()).status == 200, size
            assert sha256(a.requests[-1].body).digest() == sha256(body).digest(), size
            a.requests.clear()
    await gateway.settled([a], sent=len(EDGES) + 2)


async def test_b112_a_body_too_large_is_refused_unread(gateway: GatewayProcess, a: Fake) -> None:
    """One byte above the limit, declared: 413 in OpenAI's shape while most of the body is still to come, and the
    connection ends in order though the client goes on sending for a while."""
    async with RawClient(gateway.port) as client:
        request = post(sized(LIMIT + 1))
        await client.send(request[:100_000])
        response = await client.response(timeout_s=5)
        assert (response.status, response.error()["code"]) == (413, "request_too_large")
        assert response.header("connection") == "close"
        await client.send(request[100_000:MIB])
        assert await client.closed()
    assert a.hits == 0
    await gateway.settled([a], sent=1)


async def floods(port: int, clients: int) -> list[tuple[int, int]]:
    """Clients that pour without end: for each, what it was told, and how many bytes it had sent by then."""
    command = ("nice", "-n", "19", sys.executable, "-m", "tests.faults.pour", str(port), str(clients))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    lines = [line.split() for line in output.decode().splitlines()]
    assert len(lines) == clients
    return [(int(status), int(sent)) for status, sent in lines]


async def test_b113_a_chunked_body_is_refused_at_the_limit(gateway: GatewayProcess, a: Fake) -> None:
    """A body without end, in chunks: 413 when the limit is crossed, memory within twice the limit, no backend asked."""
    rss = gateway.rss
    [(status, sent)] = await floods(gateway.port, 1)
    assert status == 413
    assert LIMIT < sent < LIMIT + 16 * MIB  # what is in the sockets between us
    assert gateway.rss - rss < 2 * LIMIT
    assert a.hits == 0
    await gateway.settled([a], outcomes={"request_too_large": 1})


async def test_b113_tiny_chunks_cost_no_more(gateway: GatewayProcess, a: Fake) -> None:
    """40,000 chunks of one byte: served, in the time that as many bytes take."""
    body, cpu = sized(40_000), gateway.cpu_s
    assert (await ask(gateway.port, chunked(body, size=1))).status == 200
    assert a.requests[0].body == body
    assert gateway.cpu_s - cpu < 0.5
    await gateway.settled([a], sent=1)


async def test_b113_more_than_was_declared_is_no_body(gateway: GatewayProcess, a: Fake) -> None:
    """A length of 10 and much more sent: the ten bytes are refused, what follows is no request, memory is flat."""
    rss = gateway.rss
    async with RawClient(gateway.port) as client:
        request = post(b"", "/v1/chat/completions", "Content-Length: 10") + b" " * (256 * MIB)
        sending = asyncio.create_task(client.send(request))
        assert (await client.response()).status == 400
        assert await client.closed()
        with suppress(ConnectionError):
            await sending
    assert gateway.rss - rss < 8 * MIB
    assert a.hits == 0
    await gateway.settled([a], sent=1)


async def test_b113_many_endless_bodies_disturb_nobody(gateway: GatewayProcess, a: Fake) -> None:
    """50 clients pour without end; another one is served all the while, and memory stays within the budget."""
    rss = highest = gateway.rss
    flooding = asyncio.create_task(floods(gateway.port, 50))
    waits: list[float] = []
    while not flooding.done():
        begun = time.monotonic()
        assert (await ask(gateway.port, chat())).status == 200
        waits.append(time.monotonic() - begun)
        highest = max(highest, gateway.rss)
    assert {status for status, _ in await flooding} <= {413, 503}
    assert sorted(waits)[len(waits) * 99 // 100] < 0.6
    assert highest - rss < BUFFERED + 50 * MIB
    await gateway.settled([a], sent=50 + len(waits))


ENCODED = {
    "gzip": gzip.compress(bytes(64 * MIB)),
    "x-gzip": gzip.compress(bytes(1000)) * 1000,
    "GZIP": gzip.compress(b'{"model":"m","messages":[]}'),
    "gzip, gzip": gzip.compress(gzip.compress(bytes(MIB))),
    "identity, gzip": gzip.compress(b"{}"),
    "deflate": b"x",
    "br": b"x",
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(16 * 1024),
}


async def test_b114_compressed_bodies_are_not_inflated(gateway: GatewayProcess, a: Fake) -> None:
    """Bombs, multi-member and double gzip, and a small honest one alike: 415, at no cost."""
    rss, cpu = gateway.rss, gateway.cpu_s
    for encoding, body in ENCODED.items():
        response = await ask(gateway.port, post(body, "/v1/chat/completions", f"Content-Encoding: {encoding}"))
        assert (response.status, response.error()["code"]) == (415, "unsupported_encoding"), encoding
    assert gateway.rss - rss < 8 * MIB
    assert gateway.cpu_s - cpu < 0.5
    assert a.hits == 0
    await gateway.settled([a], sent=len(ENCODED))


def form(*fields: tuple[str, bytes], mark: bytes = b"b0undary") -> bytes:
    parts = (
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (mark, name.encode(), content)
        for name, content in fields
    )
    return b"".join(parts) + b"--" + mark + b"--\r\n"


AUDIO = bytes(range(256)) * 40 + b"\r\n--b0undar"
FORMS = {
    "wrong boundary": (form(("model", b"m"), mark=b"other"), 400),
    "cut in the file": (form(("model", b"m"), ("file", AUDIO))[:-50], 400),
    "cut in the head": (form(("model", b"m"), ("file", AUDIO))[:20], 400),
    "empty": (b"", 400),
    "no part": (b"--b0undary--\r\n", 400),
    "no model": (form(("file", AUDIO)), 400),
    "empty model": (form(("model", b""), ("file", AUDIO)), 400),
    "two models": (form(("model", b"m"), ("file", AUDIO), ("model", b"short")), 400),
    "unknown model": (form(("model", b"nope"), ("file", AUDIO)), 404),
    "model that is no text": (form(("model", b"\xff\xfe"), ("file", AUDIO)), 404),
    "10,000 parts": (form(("model", b"m"), *[("x", b"")] * 10_000), 413),
    "json": (b'{"model":"m"}', 400),
}


async def test_b116_malformed_forms_are_refused(gateway: GatewayProcess, a: Fake) -> None:
    """400, 404 or 413 in OpenAI's shape, no backend asked, nothing left in a temporary file."""
    kind = "Content-Type: multipart/form-data; boundary=b0undary"
    async with RawClient(gateway.port) as client:
        for name, (body, status) in FORMS.items():
            response = await client.ask(post(body, "/v1/audio/transcriptions", kind))
            assert response.status == status, name
            assert response.error()["type"] == "invalid_request_error"
        for kind in ("multipart/form-data", "multipart/mixed; boundary=b", "multipart/form-data; boundary="):
            body = form(("model", b"m"))
            response = await client.ask(post(body, "/v1/audio/transcriptions", f"Content-Type: {kind}"))
            assert response.status == 400
    assert a.hits == 0
    await gateway.settled([a], sent=len(FORMS) + 3)


@pytest.mark.parametrize("name", ["m", *UPSTREAM_NAMES])
async def test_b116_forms_pass_but_for_the_model(gateway: GatewayProcess, a: Fake, name: str) -> None:
    """The file is untouched, the model gets the backends' name, a privileged field is gone."""
    fields = [("file", AUDIO), ("model", name.encode()), ("language", b"en")]
    kind = "Content-Type: multipart/form-data; boundary=b0undary"
    body = form(fields[0], ("priority", b"-9"), *fields[1:])
    assert (await ask(gateway.port, post(body, "/v1/audio/transcriptions", kind))).status == 200
    upstream = UPSTREAM_NAMES.get(name, name).encode()
    assert a.requests[0].body == form(fields[0], ("model", upstream), fields[2])
    assert a.requests[0].header("content-type") == kind.partition(": ")[2]
    await gateway.settled([a], sent=1)


PLAIN = b'{"model":"m","messages":[]}'
BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "brace": (b"{", 400),
    "list": (b"[]", 400),
    "string": (b'"x"', 400),
    "null": (b"null", 400),
    "no model": (b"{}", 400),
    "trailing garbage": (PLAIN + b"x", 400),
    "two objects": (PLAIN + PLAIN, 400),
    "BOM": (b"\xef\xbb\xbf" + PLAIN, 400),
    "UTF-16": (PLAIN.decode().encode("utf-16"), 400),
    "UTF-32": (PLAIN.decode().encode("utf-32"), 400),
    "invalid UTF-8": (b'{"model":"m","messages":["\xff"]}', 400),
    "surrogate in UTF-8": (b'{"model":"m","messages":["\xed\xa0\xbd"]}', 400),
    "NaN": (b'{"model":"m","messages":[],"temperature":NaN}', 400),
    "Infinity": (b'{"model":"m","messages":[],"temperature":-Infinity}', 400),
    "single quotes": (b"{'model':'m'}", 400),
    "comma": (b'{"model":"m",}', 400),
    "control character": (b'{"model":"m","x":"\x01"}', 400),
    "100,000 brackets": (b'{"model":"m","x":' + b"[" * 100_000, 400),
    "only brackets": (b"[" * 100_000, 400),
    "deep and closed": (b'{"model":"m","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "number for a model": (b'{"model":123,"messages":[]}', 400),
    "empty model": (b'{"model":"","messages":[]}', 400),
    "null model": (b'{"model":null,"messages":[]}', 400),
    "half a pair in the model": (b'{"model":"\\ud83d","messages":[]}', 404),
    "unknown model": (b'{"model":"nope","messages":[]}', 404),
    "a long unknown model": (b'{"model":"' + b"n" * 100_000 + b'","messages":[]}', 404),
    "stream no flag": (b'{"model":"m","messages":[],"stream":"yes"}', 400),
    "tier no string": (b'{"model":"m","messages":[],"service_tier":[1]}', 400),
    "model twice": (b'{"model":"m","messages":[],"model":"short"}', 400),
    "any key twice": (b'{"model":"m","messages":[],"x":1, "x":2}', 400),
    "10,000 keys": (b'{"model":"m",' + b",".join(b'"k%d":1' % number for number in range(10_000)) + b"}", 400),
}
GOOD: dict[str, bytes] = {
    "messages null": b'{"model":"m","messages":null}',
    "no messages": b'{"model":"m"}',
    "blanks around": b" \r\n\t" + PLAIN + b"\n\n",
    "flag null": b'{"model":"m","messages":[],"stream":null,"service_tier":null,"max_tokens":null}',
    "limit no number": b'{"model":"m","messages":[],"max_tokens":"many","stream_options":[]}',
    "500 brackets": b'{"model":"m","x":' + b"[" * 500 + b"]" * 500 + b"}",
}


async def test_b117_bad_json_is_the_callers_fault(gateway: GatewayProcess, a: Fake) -> None:
    """400 or 404 in OpenAI's shape, short, never 500; the connection stays good and no backend is asked."""
    async with RawClient(gateway.port) as client:
        for name, (body, status) in BODIES.items():
            response = await client.ask(post(body))
            assert response.status == status, name
            assert response.error()["type"] == "invalid_request_error"
            assert len(response.body) < 1000, name
    assert a.hits == 0
    await gateway.settled([a], sent=len(BODIES))


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream", ""])
async def test_b117_what_an_engine_may_judge_is_forwarded(gateway: GatewayProcess, a: Fake, kind: str) -> None:
    """Odd but one JSON object that names its model: as it is, whatever its content type says."""
    async with RawClient(gateway.port) as client:
        for name, body in GOOD.items():
            assert (await client.ask(post(body, "/v1/chat/completions", f"Content-Type: {kind}"))).status == 200, name
            assert a.requests[-1].body == body, name
            assert a.requests[-1].header("content-type") == kind, name
    await gateway.settled([a], sent=len(GOOD))


VENDOR = (
    b'{"model":"%b","messages":[{"role":"critic","content":[{"type":"hologram","x":null}]},{"role":"user","content":""}],'
    b'"chat_template_kwargs":{"enable_thinking":false},"reasoning":{"effort":"high"},"x_vendor":{"a":[null,1.0]},'
    b'"temperature":null,"tools":null,"stop":[],"response_format":{"type":"json_schema"}}'
)


@pytest.mark.parametrize("name", ["m", "short"])
async def test_b118_what_is_unknown_passes(gateway: GatewayProcess, a: Fake, name: str) -> None:
    """Vendor fields, explicit nulls, empty lists, new roles and parts, in their order; extras of the answer, too."""
    answer = completion()[:-1] + b', "x_vendor": {"a": [null, 1.0, 18446744073709551617]}, "service_tier": null}'

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.answer(answer)

    await a.play(script)
    response = await ask(gateway.port, post(VENDOR % name.encode()))
    assert (response.status, response.body) == (200, answer)
    assert a.requests[0].body == VENDOR % UPSTREAM_NAMES.get(name, name).encode()
    await gateway.settled([a], sent=1)


NUMBERS = (
    b'{"seed":18446744073709551615,"model":"%b","a":18446744073709551617,"b":-9007199254740993,"logit_bias":{"1":0.1,"2":'
    b'1.0,"3":1E5,"4":1e-7,"5":-0,"6":-0.0,"7":1e400,"8":1e+2,"9":123456789012345678901234567890.0000},"messages":[],'
    b'"tools":[{"type":"function","function":{"parameters":{"const":1.50,"enum":[10000000000000000000000,0.30000]}}}]}'
)


@pytest.mark.parametrize("name", ["m", "short", LONG])
async def test_b119_numbers_keep_their_text(gateway: GatewayProcess, a: Fake, name: str) -> None:
    """64 bits and more, 1.0, 1E5, -0 and 1e400, with a rewrite and without: not a digit changes."""
    assert (await ask(gateway.port, post(NUMBERS % name.encode()))).status == 200
    assert a.requests[0].body == NUMBERS % UPSTREAM_NAMES.get(name, name).encode()
    await gateway.settled([a], sent=1)


async def test_b121_other_scripts_pass(gateway: GatewayProcess, a: Fake) -> None:
    """Raw UTF-8 in request and answer headers passes byte for byte; models have names in any script, known or not."""
    text = "张三".encode()

    async def script(connection: FakeConnection) -> None:
        body = completion()
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\nX-User: %b\r\nContent-Length: %d\r\n\r\n" % (text, len(body)) + body)

    await a.play(script)
    request = chat("X-User: ", model="中文模型").replace(b"X-User: ", b"X-User: " + text)
    response = await ask(gateway.port, request)
    assert response.status == 200
    assert (a.requests[0].header("x-user") or "").encode("latin-1") == text
    assert (response.header("x-user") or "").encode("latin-1") == text
    for model in ("不存在", "\u2028", "\0", "😀" * 1000):
        response = await ask(gateway.port, chat(model=model))
        assert (response.status, response.error()["code"]) == (404, "model_not_found")
        assert len(response.body) < 2000
    await gateway.settled([a], sent=5)


OURS = {"host", "content-length", "content-type", "accept-encoding", "x-request-id", "traceparent", "user-agent"}


async def test_b122_bookkeeping_stays_here(tmp_path: Path) -> None:
    """A tenant with every kind of limit, on every path: nothing of ours in the body but the documented salt, no header
    but request id and trace."""
    limits = {"requests_per_minute": 1000, "tokens_per_minute": "10M", "concurrent": 100}
    tenants = {"t": {"keys": [{"sha256": DIGEST}], "limits": limits | {"models": {"m": limits}}, "weight": 2}}
    secret = tmp_path / "secret"
    secret.write_text("of-the-tests-of-bookkeeping-only")
    async with Fake(healthy) as fake:
        config = pool(fake.url, tenants=tenants) | {"security": {"secret": f"file:{secret}"}}
        async with GatewayProcess(config, tmp_path) as gateway:
            await bookkeeping(gateway, fake)


async def bookkeeping(gateway: GatewayProcess, fake: Fake) -> None:
    sent = {"model": "m", "messages": [], "input": "x", "prompt": "x", "max_tokens": 5, "user": "u", "n": 1}
    lines = [f"Authorization: Bearer {KEY}", "User-Agent: test", "X-Headrace-Class: batch", "X-Stainless-Lang: py"]
    for path in ENDPOINTS:
        response = await ask(gateway.port, post(sent, path, *lines))
        assert response.status == 200, path
        assert fake.requests[-1].target == path
        arrived = fake.requests[-1].json()
        assert list(arrived) in (list(sent), ["cache_salt", *sent])
        assert {name: arrived[name] for name in sent} == sent
        assert {name for name, _ in fake.requests[-1].headers} <= OURS
    assert fake.hits == len(ENDPOINTS)
    await gateway.settled([fake], sent=len(ENDPOINTS))
