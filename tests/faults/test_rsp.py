"""How answers reach the client: framing, encodings, headers, odd statuses. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from typing import Any

import h11
import httptools
import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, Script, completion, event, usage_event
from tests.faults.process import GatewayProcess, pool
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio

JSON = b"Content-Type: application/json\r\n"


def sends(*pieces: bytes, close: bool = False) -> Script:
    """Answers every request with these bytes."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            for piece in pieces:
                await connection.send(piece)
            connection.finish()
            if close:
                connection.fin()
                return

    return script


def answer(status: str, body: bytes, *lines: bytes, length: int | None = None) -> bytes:
    """A whole response of exact bytes."""
    head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n" % (status.encode(), len(body) if length is None else length)
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


async def raw(port: int, request: bytes) -> bytes:
    """All bytes of a response; the request asks for the connection to be closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(20):
        data = await reader.read()
    writer.close()
    return data


class Strict:
    """A response as llhttp, without leniencies, reads it."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.complete = False
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(data)
        self.status = parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


def by_h11(data: bytes) -> bytes:
    """The body as h11 reads it."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    body = b""
    while not isinstance(part := connection.next_event(), h11.EndOfMessage):
        if isinstance(part, h11.Data):
            body += bytes(part.data)
    return body


FLAT = b'{"object":"error","message":"m","type":"t","code":400  }'


@pytest.mark.parametrize("stream", [False, True])
async def test_b123_a_replaced_body_has_its_own_length(gateway: GatewayProcess, a: Fake, stream: bool) -> None:
    """An engine's flat 400 gets OpenAI's shape, a refusal of the gateway's own has one anyway: one length, the real
    one, and JSON that parses to its end."""
    await a.play(sends(answer("400 Bad Request", FLAT, JSON.strip())))
    for request in (chat("Connection: close", stream=stream), chat("Connection: close", stream=stream, model="nope")):
        data = await raw(gateway.port, request)
        head, _, body = data.partition(b"\r\n\r\n")
        strict = Strict(data)
        assert (strict.all(b"content-length"), strict.all(b"transfer-encoding")) == ([b"%d" % len(body)], [])
        assert strict.complete and strict.body == body
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert head.lower().count(b"content-type") == 1
    await gateway.settled([a], outcomes={"upstream_rejected": 1, "model_not_found": 1})


EVENTS = event("one") + event("two") + event(finish="stop") + usage_event() + DONE
SSE = b"Content-Type: text/event-stream\r\n"
FRAMINGS = {
    "chunked": (
        b"HTTP/1.1 200 OK\r\n"
        + SSE
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENTS), EVENTS),
        False,
    ),
    "length": (b"HTTP/1.1 200 OK\r\n" + SSE + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS, False),
    "close": (b"HTTP/1.1 200 OK\r\n" + SSE + b"Connection: close\r\n\r\n" + EVENTS, True),
    "http-1.0": (b"HTTP/1.0 200 OK\r\n" + SSE + b"\r\n" + EVENTS, True),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_b124_streams_have_one_framing(gateway: GatewayProcess, a: Fake, framing: str, version: str) -> None:
    """However the backend frames its events, the client's head never has both a length and chunks, two strict parsers
    read it, and all events are there; a client of HTTP/1.0 gets no chunks."""
    data, close = FRAMINGS[framing]
    await a.play(sends(data, close=close))
    request = chat("Connection: close", stream=True, stream_options={"include_usage": True})
    got = await raw(gateway.port, request.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
    strict = Strict(got)
    assert strict.status == 200
    assert strict.all(b"content-length") == []
    assert strict.all(b"transfer-encoding") == ([b"chunked"] if version == "1.1" else [])
    assert strict.body == by_h11(got) == EVENTS
    await gateway.settled([a], outcomes={"ok": 1})


ERROR = b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}'
ENCODINGS = {
    "none": (ERROR, []),
    "gzip": (gzip.compress(ERROR), [b"Content-Encoding: gzip"]),
    "x-gzip": (gzip.compress(ERROR), [b"Content-Encoding: X-GZIP"]),
    "deflate": (zlib.compress(ERROR), [b"Content-Encoding: deflate"]),
    "two members": (gzip.compress(ERROR[:20]) + gzip.compress(ERROR[20:]), [b"Content-Encoding: gzip"]),
    "a false claim": (ERROR, [b"Content-Encoding: gzip"]),
}


@pytest.mark.parametrize("accepts", [None, "identity", "gzip"])
async def test_b126_compressed_answers_are_consistent(gateway: GatewayProcess, a: Fake, accepts: str | None) -> None:
    """400, 429, 500 and 200, plain, compressed, or only claiming to be: status and a body that its headers describe,
    never a failure of ours."""
    lines = [f"Accept-Encoding: {accepts}"] if accepts else []
    async with RawClient(gateway.port) as client:
        for status in ("400 Bad Request", "429 Too Many Requests", "500 Internal Server Error", "200 OK"):
            for name, (body, claims) in ENCODINGS.items():
                await a.play(sends(answer(status, body, JSON.strip(), *claims)))
                response = await client.ask(chat(*lines))
                assert (response.status, response.body) == (int(status[:3]), ERROR), (status, name)
                assert response.header("content-encoding") is None
                assert response.header("content-length") == str(len(ERROR))
    await gateway.settled([a])


@pytest.mark.parametrize("kind", [b"text/plain", b"application/json"])
async def test_b126_what_cannot_be_undone_passes_as_it_is(gateway: GatewayProcess, a: Fake, kind: bytes) -> None:
    """An encoding that the gateway does not know: bytes and header together, and no shape is made of them."""
    body = bytes(range(256))
    await a.play(sends(answer("500 Internal Server Error", body, b"Content-Type: " + kind, b"Content-Encoding: br")))
    response = await ask(gateway.port, chat())
    assert (response.status, response.body, response.header("content-encoding")) == (500, body, "br")
    assert response.header("content-type") == kind.decode()
    await gateway.settled([a], sent=1)


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
async def test_b126_damaged_answers_are_no_success(gateway: GatewayProcess, a: Fake, kind: str) -> None:
    """A gzip body cut short inside a whole response, and one with a flipped byte: 502, or a connection that breaks."""
    whole = gzip.compress(completion() * 50)
    for body in (whole[:-30], whole[:20] + b"\xff\xff" + whole[22:]):
        await a.play(sends(answer("200 OK", body, f"Content-Type: {kind}".encode(), b"Content-Encoding: gzip")))
        response = await ask(gateway.port, chat())
        assert response.status == 502 or not response.complete
    assert "ok" not in await gateway.outcomes()
    await gateway.settled([a], sent=2)


LIMITED = [
    b"Retry-After: %b",
    b"x-ratelimit-limit-requests: 60",
    b"x-ratelimit-remaining-tokens: 0",
    b"x-ratelimit-reset-tokens: 6m0s",
    b"x-request-id: engine-1",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait", [b"30", b"Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_b127_limits_of_the_backend_are_told(gateway: GatewayProcess, a: Fake, wait: bytes, stream: bool) -> None:
    """Its 429 arrives with its Retry-After, its rate limits and its request id, each once and as it was."""
    lines = [line % wait if b"%b" in line else line for line in LIMITED]
    await a.play(sends(answer("429 Too Many Requests", ERROR, JSON.strip(), *lines)))
    response = await ask(gateway.port, chat(stream=stream))
    assert (response.status, response.body) == (429, ERROR)
    for line in lines:
        name, _, value = line.decode().partition(": ")
        assert response.all(name.lower()) == [value]
    await gateway.settled([a], sent=1)


async def test_b127_refusals_of_our_own_say_when_to_return(tmp_path: Any) -> None:
    """A full queue: 503 with a Retry-After of at least one whole second."""

    async def slow(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.5)
        await connection.answer(completion())

    classes = {"interactive": {"max_queued": 1}}
    async with Fake(slow) as fake, GatewayProcess(pool(fake.url, concurrency=1, classes=classes), tmp_path) as gateway:
        answers = await asyncio.gather(*(ask(gateway.port, chat()) for _ in range(4)))
        refused = [response for response in answers if response.status == 503]
        assert len(refused) == 2
        assert all(1 <= int(response.header("retry-after") or "") <= 60 for response in refused)
        await gateway.settled([fake], outcomes={"ok": 2, "queue_full": 2})


async def test_b128_headers_arrive_but_for_hops(gateway: GatewayProcess, a: Fake) -> None:
    """New families of headers, repeated ones line by line; one date, one content type; nothing of the hop between."""
    kept = [
        ("openai-processing-ms", "17"),
        ("x-foo-new", "1"),
        ("set-cookie", "a=1; Path=/"),
        ("set-cookie", "b=2"),
        ("server-timing", "q;dur=1"),
        ("link", "</a>; rel=x"),
        ("link", "</b>; rel=y"),
        ("content-language", "en"),
        ("x-empty", ""),
    ]
    dropped = {
        "server": "uvicorn",
        "connection": "x-private, keep-alive",
        "x-private": "1",
        "keep-alive": "timeout=5",
        "upgrade": "h2c",
        "proxy-authenticate": "Basic",
        "trailer": "x-a",
    }
    lines = [f"{name}: {value}".encode() for name, value in [*kept, *dropped.items()]]
    date = b"Date: Mon, 01 Jan 2001 00:00:00 GMT"
    await a.play(sends(answer("200 OK", completion(), JSON.strip(), date, *lines)))
    response = await ask(gateway.port, chat())
    assert response.status == 200
    assert [(name, value) for name, value in response.headers if name in dict(kept)] == kept
    assert not {name for name, _ in response.headers} & dropped.keys()
    assert len(response.all("date")) == 1 and "2001" not in response.all("date")[0]
    assert response.all("content-type") == ["application/json"]
    assert len(response.all("x-request-id")) == 1
    await gateway.settled([a], sent=1)


PAGE = b"<html><body>Bad gateway</body></html>"
ODD = {
    "html": ("502 Bad Gateway", "text/html", PAGE, "upstream_error"),
    "text": ("200 OK", "text/plain", b"hello", "upstream_bad_response"),
    "empty": ("500 Internal Server Error", "application/json", b"", "upstream_error"),
    "null": ("200 OK", "application/json", b"null", "upstream_bad_response"),
    "cut JSON": ("200 OK", "application/json", completion()[:-10], "upstream_bad_response"),
    "no UTF-8": ("200 OK", "application/json", completion("x").replace(b"x", b"\xff"), "ok"),
    "no body": ("200 OK", "application/json", b"", "upstream_bad_response"),
    "odd status": ("499 Gone Away", "application/json", ERROR, "upstream_rejected"),
    "unknown status": ("799 Whatever", "application/json", ERROR, "upstream_error"),
    "redirect": ("307 Temporary Redirect", "text/html", PAGE, "upstream_bad_response"),
    "no type": ("200 OK", "", completion(), "ok"),
}


@pytest.mark.parametrize("kind", ODD)
async def test_b129_odd_answers_are_relayed(gateway: GatewayProcess, a: Fake, kind: str) -> None:
    """What is no JSON is passed with its status, type and bytes; the outcome says what it was."""
    status, content_type, body, outcome = ODD[kind]
    lines = [f"Content-Type: {content_type}".encode()] if content_type else []
    await a.play(sends(answer(status, body, *lines)))
    response = await ask(gateway.port, chat())
    assert (response.status, response.body) == (int(status[:3]), body)
    assert response.header("content-type") == (content_type or None)
    await gateway.settled([a], outcomes={outcome: 1})


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
async def test_b129_answers_that_break_off_are_no_answers(
    gateway: GatewayProcess, a: Fake, status: str, content_type: str
) -> None:
    """Less than the declared length: 502 where nothing was sent on yet, else a connection that visibly breaks."""
    head = answer(status, completion()[:-10], f"Content-Type: {content_type}".encode(), length=len(completion()))
    await a.play(sends(head, close=True))
    response = await ask(gateway.port, chat())
    assert response.status == 502 or not response.complete
    assert response.status == 502 or content_type == "text/plain"
    await gateway.settled([a], outcomes={"upstream_truncated": 1})


EMPTY = {
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "204 with a length": b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    "304": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\n\r\n',
    "304 with the length of the 200": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 1000\r\n\r\n',
    "200 of no length": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}


async def test_b130_answers_without_a_body_keep_the_connection_in_step(gateway: GatewayProcess, a: Fake) -> None:
    """204, 304, an empty 200, and HEAD, each followed by an ordinary request on one connection: no stray byte, no
    wait, and no length where the status forbids it."""
    async with RawClient(gateway.port) as client:
        for name, data in EMPTY.items():
            await a.play(sends(data))
            begun = time.monotonic()
            response = await client.ask(chat())
            expected = int(data.rpartition(b"HTTP/1.1 ")[2][:3])
            assert (response.status, response.complete, response.body) == (expected, True, b""), name
            lengths = response.all("content-length")
            assert lengths == (["0"] if expected == 200 else []), name
            assert response.all("transfer-encoding") == []
            assert await follows(client, a)
            assert time.monotonic() - begun < 2
        for path in ("/v1/models", "/v1/models/m", "/nowhere", "/v1/chat/completions"):
            response = await client.ask(f"HEAD {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
            assert (response.complete, response.body) == (True, b"")
            assert await follows(client, a)
    async with RawClient(gateway.admin_port) as client:
        for path in ("/livez", "/readyz", "/metrics"):
            for method in ("HEAD", "GET"):
                response = await client.ask(f"{method} {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
                assert (response.status, response.complete) == (200, True)
    await gateway.settled([a])


async def follows(client: RawClient, fake: Fake) -> bool:
    """Whether the next request on the connection is answered as it should be."""
    await fake.play(sends(answer("200 OK", completion("next"), JSON.strip())))
    response: Response = await client.ask(chat())
    return response.status == 200 and response.body == completion("next")
