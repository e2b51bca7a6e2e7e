"""Oddities of HTTP between clients and the gateway. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, Script, completion, event, healthy
from tests.faults.process import DIGEST, KEY, GatewayProcess, busy, pool
from tests.faults.rawclient import RawClient, ask, chat, post

pytestmark = pytest.mark.anyio

HEADER_S = 2.0  # how long a head may take here

BODY = b'{"model":"m","messages":[]}'
CHUNKED = b"1b\r\n" + BODY + b"\r\n0\r\n\r\n"
CONFLICTS = {
    "length-and-chunks": (["Content-Length: 27", "Transfer-Encoding: chunked"], CHUNKED),
    "chunks-and-length": (["Transfer-Encoding: chunked", "Content-Length: 4"], CHUNKED),
    "two-lengths": (["Content-Length: 27", "Content-Length: 5"], BODY),
    "list-of-lengths": (["Content-Length: 27, 27"], BODY),
    "signed-length": (["Content-Length: +27"], BODY),
    "negative-length": (["Content-Length: -1"], BODY),
    "endless-length": (["Content-Length: 99999999999999999999999"], BODY),
    "blank-before-colon": (["Content-Length : 27", "X-A: 1"], BODY),
    "xchunked": (["Transfer-Encoding: xchunked"], CHUNKED),
    "identity": (["Transfer-Encoding: identity"], BODY),
    "gzip-chunked": (["Transfer-Encoding: gzip, chunked"], CHUNKED),
    "gzip-then-chunked": (["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"], CHUNKED),
    "chunked-not-last": (["Transfer-Encoding: chunked, gzip"], CHUNKED),
    "chunked-twice": (["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], CHUNKED),
    "folded-encoding": (["Transfer-Encoding:\r\n chunked"], CHUNKED),
    "folded-header": (["X-A: 1\r\n folded", "Content-Length: 27"], BODY),
    "bare-line-feed": (["X-A: 1\nX-B: 2", "Content-Length: 27"], BODY),
    "bare-carriage-return": (["X-A: 1\rX-B: 2", "Content-Length: 27"], BODY),
    "nul": (["X-A: \0", "Content-Length: 27"], BODY),
    "chunk-size-no-number": (["Transfer-Encoding: chunked"], b"zz\r\n" + BODY),
    "chunk-size-with-0x": (["Transfer-Encoding: chunked"], b"0x1b\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk-size-overflow": (["Transfer-Encoding: chunked"], b"1000000000000001b\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk-longer-than-said": (["Transfer-Encoding: chunked"], b"5\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk-ended-by-line-feed": (["Transfer-Encoding: chunked"], CHUNKED.replace(b"\r\n", b"\n")),
    "line-feed-in-chunk-extension": (["Transfer-Encoding: chunked"], CHUNKED.replace(b"1b\r\n", b"1b;a\nb\r\n")),
}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """A head may take two seconds only."""
    return {"server": {"header_timeout": f"{HEADER_S}s"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_b140_conflicting_framing_is_refused(gateway: GatewayProcess, a: Fake, path: str) -> None:
    """400 and the connection closed, whatever stands behind it; nothing of it reaches a backend."""
    for conflict, (lines, body) in CONFLICTS.items():
        async with RawClient(gateway.port) as client:
            response = await client.ask(post(body, path, *lines) + post(BODY), timeout_s=5)
            assert (response.status, response.header("connection")) == (400, "close") or (
                path == "/v1/models" and response.status == 405  # answered before its body was looked at
            ), conflict
            assert response.error()["type"] == "invalid_request_error"
            assert await client.closed(timeout_s=5), conflict
        assert a.hits == 0, conflict
    await gateway.settled([a])


async def test_b140_a_body_that_breaks_later_is_refused(gateway: GatewayProcess, a: Fake) -> None:
    """Half of the chunks are fine and have been read when a bad one comes: 400 at once, closed, counted once."""
    async with RawClient(gateway.port) as client:
        await client.send(post(b"1b\r\n" + BODY + b"\r\n", "/v1/chat/completions", "Transfer-Encoding: chunked"))
        await asyncio.sleep(0.05)
        response = await client.ask(b"zz\r\n", timeout_s=5)
        assert (response.status, response.error()["code"]) == (400, "invalid_request")
        assert await client.closed(timeout_s=5)
    assert await gateway.outcomes() == {"invalid_request": 1}
    await gateway.settled([a])


async def test_b140_a_broken_body_ends_only_its_own_request(gateway: GatewayProcess, a: Fake) -> None:
    """The request before it, still under way when its framing breaks, is answered first and in full."""

    async def slow(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.3)
        await connection.answer(completion("first"))

    await a.play(slow)
    async with RawClient(gateway.port) as client:
        await client.send(chat() + post(b"zz\r\n", "/v1/chat/completions", "Transfer-Encoding: chunked"))
        first, second = await client.response(), await client.response()
        assert (first.status, second.status) == (200, 400)
        assert first.json()["choices"][0]["message"]["content"] == "first"
        assert await client.closed()
    assert a.hits == 1
    await gateway.settled([a])


async def test_b140_trailers_are_no_headers(gateway: GatewayProcess, a: Fake) -> None:
    """What stands behind a chunked body neither reaches the backend nor counts as the client's own headers."""
    trailers = b"X-User: t\r\nX-Headrace-Class: batch\r\nAuthorization: Bearer k\r\n"
    body = CHUNKED.removesuffix(b"\r\n") + trailers + b"\r\n"
    async with RawClient(gateway.port) as client:
        for _ in range(2):
            response = await client.ask(post(body, "/v1/chat/completions", "Transfer-Encoding: chunked"))
            assert (response.status, response.header("x-headrace-class")) == (200, "interactive")
    assert [request.body for request in a.requests] == [BODY, BODY]
    assert all(request.header("x-user") is None for request in a.requests)
    await gateway.settled([a])


@pytest.mark.parametrize("flood", ["trailers", "one trailer", "chunk extension"])
async def test_b140_what_is_neither_head_nor_body_is_bounded(gateway: GatewayProcess, a: Fake, flood: str) -> None:
    """Trailers and chunk extensions without end: refused after 64 KiB, closed, and no memory grows."""
    begin, more = {
        "trailers": (CHUNKED.removesuffix(b"\r\n"), b"X-A: b\r\n" * 1000),
        "one trailer": (CHUNKED.removesuffix(b"\r\n") + b"X-A: ", b"a" * 8000),
        "chunk extension": (b"1b;", b"a" * 8000),
    }[flood]
    rss = gateway.rss
    async with RawClient(gateway.port) as client:
        await client.send(post(begin, "/v1/chat/completions", "Transfer-Encoding: chunked"))
        sending = asyncio.create_task(endless(client, more))
        response = await client.response(timeout_s=5)
        sending.cancel()
        assert response.status == 400
        assert await client.closed(timeout_s=5)
    assert a.hits == 0
    assert gateway.rss - rss < 8 * 2**20
    await gateway.settled([a])


async def endless(client: RawClient, data: bytes, pause_s: float = 0.001) -> None:
    """Send until the connection breaks."""
    try:
        while True:
            await client.send(data)
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass


async def test_b136_a_head_behind_a_large_body_is_not_too_large(gateway: GatewayProcess, a: Fake) -> None:
    """100 KiB of body and the first bytes of the next head come in one segment: both requests are answered."""
    large = post(BODY[:-1] + b',"x":"' + b"a" * 100_000 + b'"}')
    async with RawClient(gateway.port) as client:
        await client.send(large + chat()[:20])
        await asyncio.sleep(0.1)
        await client.send(chat()[20:])
        assert [(await client.response()).status for _ in range(2)] == [200, 200]
    assert a.hits == 2
    await gateway.settled([a])


async def test_b139_a_refused_connection_starts_nothing(gateway: GatewayProcess, a: Fake) -> None:
    """A head of 64 KiB and more, whole, with a good request right behind it: 431, closed, no backend reached."""
    async with RawClient(gateway.port) as client:
        large = chat("X-A: " + "a" * 66_000)
        response = await client.ask(large + chat(), timeout_s=5)
        assert (response.status, response.error()["code"]) == (431, "headers_too_large")
        assert await client.closed(timeout_s=5)
    assert a.hits == 0
    await gateway.settled([a])


async def test_b139_line_ends_do_not_keep_a_connection(gateway: GatewayProcess, a: Fake) -> None:
    """After an answer a client sends one empty line and no more: the connection ends with the head's time."""
    async with RawClient(gateway.port) as client:
        assert (await client.ask(chat())).status == 200
        await client.send(b"\r\n")
        begun = time.monotonic()
        assert await client.closed(timeout_s=HEADER_S + 3)
        assert time.monotonic() - begun > HEADER_S - 0.5
    await gateway.settled([a])


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("split", [False, True])
async def test_b140_an_offered_upgrade_costs_no_body(
    gateway: GatewayProcess, a: Fake, framing: str, split: bool
) -> None:
    """Clients that offer h2c with a POST (curl, Java) are answered in HTTP/1.1, body and next request included."""
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"]
    if framing == "chunks":
        offer.append("Transfer-Encoding: chunked")
    data = post(CHUNKED if framing == "chunks" else BODY, "/v1/chat/completions", *offer)
    head, _, body = data.partition(b"\r\n\r\n")
    async with RawClient(gateway.port) as client:
        await client.send(head + b"\r\n\r\n" + (b"" if split else body + chat()))
        if split:
            await asyncio.sleep(0.05)
            await client.send(body + chat())
        assert [(await client.response()).status for _ in range(2)] == [200, 200]
    assert a.requests[0].body == BODY
    assert {name for name, _ in a.requests[0].headers}.isdisjoint({"upgrade", "http2-settings", "connection"})
    assert a.hits == 2
    await gateway.settled([a])


async def test_b140_a_body_never_becomes_a_request(gateway: GatewayProcess, a: Fake) -> None:
    """An upgrade offer with a body that reads like a request: it is a body, however it is cut."""
    hidden = chat()
    head = post(hidden, "/v1/chat/completions", "Connection: Upgrade", "Upgrade: h2c")[: -len(hidden)]
    async with RawClient(gateway.port) as client:
        await client.send(head)
        await asyncio.sleep(0.05)
        response = await client.ask(hidden)
        assert (response.status, response.error()["code"]) == (400, "invalid_body")
        await asyncio.sleep(0.1)
    await gateway.idle([a])
    assert a.hits == 0
    await gateway.settled([a])


@pytest.mark.parametrize("head", [b"CONNECT evil:80 HTTP/1.1\r\nHost: g\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_b140_no_tunnel_and_no_http2(gateway: GatewayProcess, a: Fake, head: bytes) -> None:
    """CONNECT and the preface of HTTP/2 are refused and closed."""
    async with RawClient(gateway.port) as client:
        assert (await client.ask(head)).status == 400
        assert await client.closed()
    await gateway.settled([a])


async def test_b136_a_pipeline_has_an_end(gateway: GatewayProcess, a: Fake) -> None:
    """20,000 requests in one go behind a slow one: some are answered, the rest never start, and memory is flat."""

    async def slow(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await asyncio.sleep(0.5)
            await connection.answer(completion())

    await a.play(slow)
    rss = gateway.rss
    async with RawClient(gateway.port) as client:
        sending = asyncio.create_task(client.send(chat() + b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" * 20_000))
        first = await client.response()
        answers = [await client.response(method="GET") for _ in range(64)]
        assert {first.status, *(answer.status for answer in answers)} == {200}
        assert gateway.rss - rss < 12 * 2**20
        assert await client.closed()
        sending.cancel()
    await gateway.settled([a])


@pytest.mark.parametrize("header", ["Host: evil", "Content-Type: multipart/form-data; boundary=x"])
async def test_b140_of_two_headers_neither_is_chosen(gateway: GatewayProcess, a: Fake, header: str) -> None:
    """A second Host, a second content type: what the gateway reads and what a backend reads could differ."""
    response = await ask(gateway.port, chat(header, "Content-Type: application/json"))
    assert (response.status, response.error()["code"]) == (400, "invalid_request")
    response = await ask(gateway.port, chat("Content-Encoding: gzip", "Content-Encoding: identity"))
    assert (response.status, response.error()["code"]) == (400, "invalid_request")
    assert a.hits == 0
    await gateway.settled([a])


async def test_b140_hop_by_hop_headers_end_here(gateway: GatewayProcess, a: Fake) -> None:
    """What Connection names, and what never passes a proxy, does not reach the backend; the rest does."""
    hops = [
        "Connection: close, X-Internal-Auth",
        "X-Internal-Auth: 1",
        "TE: trailers",
        "Upgrade: h2c",
        "Proxy-Authorization: Basic c2VjcmV0",
        "Proxy-Connection: keep-alive",
        "Keep-Alive: timeout=5",
        "Trailer: X-A",
        "X-Kept: yes",
    ]
    response = await ask(gateway.port, chat(*hops))
    assert (response.status, response.header("connection")) == (200, "close")
    expected = {"host", "content-type", "content-length", "accept-encoding", "x-request-id", "x-kept"}
    assert {name for name, _ in a.requests[0].headers} == expected
    await gateway.settled([a])


LARGE = b'{"model":"m","messages":[],"x":"' + b"a" * 5 * 2**20 + b'"}'


async def test_b134_expect_is_answered_where_the_body_is_wanted(gateway: GatewayProcess, a: Fake) -> None:
    """100 Continue at once, and no word of it to the backend; a client of HTTP/1.0 gets no interim answer."""
    data = post(LARGE, "/v1/chat/completions", "Expect: 100-continue")
    head = data[: -len(LARGE)]
    async with RawClient(gateway.port) as client:
        begun = time.monotonic()
        await client.send(head)
        assert (await client.interim()).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert time.monotonic() - begun < 0.1 * busy()
        assert (await client.ask(LARGE)).status == 200
    assert a.requests[0].header("expect") is None
    old = chat("Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    response = await ask(gateway.port, old)
    assert (response.status, response.interim) == (200, [])
    await gateway.settled([a])


async def test_b134_expect_is_not_answered_where_the_request_is_refused(tmp_path: Path) -> None:
    """A bad key, a declared size above the limit: 401 and 413 without 100 Continue, and the body is not needed."""
    tenants = {"t": {"keys": [{"sha256": DIGEST}]}}
    async with (
        Fake(healthy) as fake,
        GatewayProcess(pool(fake.url, tenants=tenants, server={"max_body": "1MiB"}), tmp_path) as gateway,
    ):
        for lines, status in (
            (["Authorization: Bearer wrong"], 401),
            ([f"Authorization: Bearer {KEY}"], 413),
            ([f"Authorization: Bearer {KEY}", "Content-Encoding: gzip"], 415),
        ):
            head = post(LARGE, "/v1/chat/completions", "Expect: 100-continue", *lines)[: -len(LARGE)]
            async with RawClient(gateway.port) as client:
                response = await client.ask(head)
                assert (response.status, response.interim) == (status, [])
                assert response.error()["type"] == "invalid_request_error"
                assert await client.closed()
        assert fake.hits == 0
        await gateway.settled([fake])


@pytest.mark.parametrize("stream", [False, True])
async def test_b136_pipelined_requests_are_answered_in_order(gateway: GatewayProcess, a: Fake, stream: bool) -> None:
    """Two in one segment: the second waits for the whole answer to the first, be it a stream."""
    await a.play(numbered())
    async with RawClient(gateway.port) as client:
        await client.send(chat(stream=stream) + chat(stream=stream))
        first, second = await client.response(), await client.response()
    assert (first.complete, second.complete) == (True, True)
    assert b"answer 1" in first.body and b"answer 2" in second.body
    assert a.requests[1].at > a.requests[0].at + 0.15
    assert a.hits == 2
    await gateway.settled([a])


@pytest.mark.parametrize("stream", [False, True])
async def test_b136_nothing_is_answered_behind_connection_close(gateway: GatewayProcess, a: Fake, stream: bool) -> None:
    """The first of two says `Connection: close`: one answer, then the end; the second never starts."""
    await a.play(numbered())
    async with RawClient(gateway.port) as client:
        response = await client.ask(chat("Connection: close", stream=stream) + chat(stream=stream))
        assert response.complete
        assert response.header("connection") == "close"
        assert await client.closed()
    assert a.hits == 1
    await gateway.settled([a])


def numbered() -> Script:
    """Every answer takes 200 ms and says which it is."""
    numbers = count(1)

    async def script(connection: FakeConnection) -> None:
        while True:
            request = await connection.request()
            text = f"answer {next(numbers)}"
            if request.json().get("stream"):
                await connection.stream_head()
                await connection.chunk(event(text))
                await asyncio.sleep(0.2)
                await connection.chunk(event(finish="stop") + DONE)
                await connection.last_chunk()
            else:
                await asyncio.sleep(0.2)
                await connection.answer(completion(text))

    return script


async def test_b137_one_connection_serves_a_thousand_requests(gateway: GatewayProcess, a: Fake) -> None:
    """Streams, whole answers, refusals, HEAD and a body in two segments, in turn on one socket: nothing gets stuck."""
    large = chat(x="a" * 65_536)
    kinds = [
        ([chat(stream=True)], "POST", 200),
        ([chat()], "POST", 200),
        ([post(b"{")], "POST", 400),
        ([b"HEAD /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"], "HEAD", 200),
        ([large[:1000], large[1000:]], "POST", 200),
    ]
    slowest = 0.0
    async with RawClient(gateway.port) as client:
        for number in range(1000):
            pieces, method, status = kinds[number % len(kinds)]
            begun = time.monotonic()
            for piece in pieces[:-1]:
                await client.send(piece)
                await asyncio.sleep(0.005)
            await client.send(pieces[-1])
            response = await client.response(method=method)
            assert (response.status, response.complete) == (status, True), number
            slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 1.0
    assert await gateway.outcomes() == {"ok": 600, "invalid_body": 200}
    await gateway.settled([a])


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_b138_a_half_closed_client_is_gone(
    gateway: GatewayProcess, a: Fake, stream: bool, version: bytes
) -> None:
    """Documented: who shuts down its sending side is treated as gone. 499, the backend let go within a second, and
    no half-written success."""

    async def slow(connection: FakeConnection) -> None:
        await connection.request()
        await connection.wait_closed()
        connection.finish()

    await a.play(slow)
    async with RawClient(gateway.port) as client:
        await client.send(chat(stream=stream).replace(b"HTTP/1.1", version))
        await gateway.eventually(lambda: a.hits == 1, "the backend is asked")
        begun = time.monotonic()
        client.half_close()
        assert not (await client.response()).status
        await gateway.eventually(lambda: a.closed, "the backend is let go")
        assert a.closed[0].at - begun < 1.0
    assert await gateway.outcomes() == {"client_disconnect": 1}
    await gateway.eventually(lambda: [line["status"] for line in gateway.lines] == [499], "one line of 499")
    await gateway.settled([a])


async def test_b139_large_heads_pass_up_to_the_limit(gateway: GatewayProcess, a: Fake) -> None:
    """8, 20 and 60 KiB of headers: served. 1 MiB in one header, or 20,000 headers: 431 and closed, memory flat."""
    for size in (8, 20, 60):
        response = await ask(gateway.port, chat("X-Token: " + "a" * size * 1024))
        assert response.status == 200, size
    assert len(a.requests[-1].header("x-token") or "") == 60 * 1024
    rss = gateway.rss
    for lines in (["X-Token: " + "a" * 2**20], [f"X-{number}: 1" for number in range(20_000)]):
        async with RawClient(gateway.port) as client:
            response = await client.ask(chat(*lines))
            assert (response.status, response.error()["code"]) == (431, "headers_too_large")
            assert await client.closed()
    assert gateway.rss - rss < 8 * 2**20
    assert a.hits == 3
    await gateway.settled([a])


async def test_b139_a_head_that_dribbles_is_cut_off(gateway: GatewayProcess, a: Fake) -> None:
    """One byte every 100 ms: 408 when the time for a head is up, and others are served as ever."""

    async def dribble(client: RawClient) -> None:
        for byte in chat("X-A: " + "a" * 1000):
            await client.send(bytes([byte]))
            await asyncio.sleep(0.1)

    async with RawClient(gateway.port) as client:
        begun = time.monotonic()
        sending = asyncio.create_task(dribble(client))
        while time.monotonic() - begun < HEADER_S - 0.5:
            assert (await ask(gateway.port, chat(), timeout_s=0.5)).status == 200
            await asyncio.sleep(0.1)
        response = await client.response(timeout_s=HEADER_S + 3)
        assert (response.status, response.error()["code"]) == (408, "request_timeout")
        assert HEADER_S - 0.5 < time.monotonic() - begun < HEADER_S + 2
        sending.cancel()
        assert await client.closed()
    await gateway.settled([a])


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("HEAD", "/v1/embeddings", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/m", "GET"),
        ("TRACE", "/v1/models", "GET"),
    ],
)
async def test_a_method_that_a_path_does_not_take(
    gateway: GatewayProcess, a: Fake, method: str, path: str, allow: str
) -> None:
    """405 in the shape of OpenAI's errors, with Allow; the connection stays good."""
    request = f"{method} {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode()
    async with RawClient(gateway.port) as client:
        response = await client.ask(request)
        assert response.status == 405
        assert allow in (response.header("allow") or "")
        assert method == "HEAD" or response.error()["code"] == "method_not_allowed"
        assert (await client.ask(chat())).status == 200
    await gateway.settled([a])


@pytest.mark.parametrize("origin", ["https://app.example", "*"])
async def test_pages_of_allowed_origins_read_answers_and_errors(tmp_path: Path, origin: str) -> None:
    """The preflight is answered here, without a key; answers and refusals name the origin. Others get none of it."""
    tenants = {"t": {"keys": [{"sha256": DIGEST}]}}
    async with (
        Fake(healthy) as fake,
        GatewayProcess(pool(fake.url, tenants=tenants, server={"cors": [origin]}), tmp_path) as gateway,
    ):
        page = "Origin: https://app.example"
        preflight = (
            f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: g\r\n{page}\r\n"
            "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"
        )
        response = await ask(gateway.port, preflight.encode())
        assert response.status == 200
        assert "authorization" in (response.header("access-control-allow-headers") or "")
        models = f"GET /v1/models HTTP/1.1\r\nHost: g\r\n{page}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        for request in (chat(page, f"Authorization: Bearer {KEY}"), chat(page), models):
            response = await ask(gateway.port, request)
            assert response.header("access-control-allow-origin") in (origin, "https://app.example")
            assert "x-request-id" in (response.header("access-control-expose-headers") or "").lower()
        if origin != "*":
            for request in (chat("Origin: https://evil.example"), chat()):
                response = await ask(gateway.port, request)
                assert response.header("access-control-allow-origin") is None
        assert fake.hits == 1
        await gateway.settled([fake])


async def test_one_client_connection_too_many_is_closed(tmp_path: Path) -> None:
    """`server.max_connections`: who is there is served on, and when one has left there is room for another."""
    async with Fake(healthy) as a, AsyncExitStack() as stack:
        config = pool(a.url, server={"max_connections": 3})
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(3)]
        assert [(await client.ask(chat())).status for client in clients] == [200] * 3
        async with RawClient(gateway.port) as another:
            assert await another.closed(timeout_s=5)
        assert (await clients[0].ask(chat())).status == 200
        clients[1].close()
        await asyncio.sleep(0.2)
        async with RawClient(gateway.port) as another:
            assert (await another.ask(chat())).status == 200


async def test_a_body_that_trickles_for_ever_is_refused(tmp_path: Path) -> None:
    """`server.body_timeout`: a byte now and then keeps no request open."""
    async with (
        Fake(healthy) as a,
        GatewayProcess(pool(a.url, server={"body_timeout": "500ms"}), tmp_path) as gateway,
        RawClient(gateway.port) as client,
    ):
        await client.send(post(b"{", "/v1/chat/completions", "Content-Length: 1000"))
        trickle = asyncio.create_task(endless(client, b" ", 0.05))
        response = await client.response(timeout_s=5)
        trickle.cancel()
        assert (response.status, response.error()["code"]) == (408, "request_timeout")
        assert "not complete after 0.5 s" in response.error()["message"]
        assert a.hits == 0
        await gateway.settled([a], outcomes={"request_timeout": 1})
