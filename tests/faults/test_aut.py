"""Keys and secrets: who gets in, and that nothing of a credential leaks. Each test is named by its public case."""

from __future__ import annotations

import base64
import hashlib
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import REFUSED
from gateway.wire import ENDPOINTS
from tests.faults.fakes import Fake, FakeConnection, completion, event, healthy
from tests.faults.process import BEARER, DIGEST, KEY, GatewayProcess, pool
from tests.faults.rawclient import RawClient, Response, ask, chat, post

pytestmark = pytest.mark.anyio

OTHER = "hr-other-key-of-the-tests-of-keys"
EXPIRED = "hr-expired-key-of-the-tests-of-keys"
PASSWORD = "s3cret-of-the-backends-of-the-tests"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tenants, one of whose keys has expired."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("of-the-tests-of-keys-and-of-nothing-else")
    keys = [{"sha256": DIGEST}, {"sha256": digest(EXPIRED), "expires": "2020-01-01T00:00:00Z"}]
    tenants = {"t": {"keys": keys}, "u": {"keys": [{"sha256": digest(OTHER)}]}}
    return {"tenants": tenants, "security": {"secret": f"file:{secret}"}}


def everything(fake: Fake) -> str:
    """All that a backend was sent."""
    return repr([(request.target, request.headers, request.body) for request in fake.requests])


async def test_b101_the_callers_key_ends_here(gateway: GatewayProcess, a: Fake) -> None:
    """On every path, neither the key nor its hash nor its base64 is in what a backend gets, and no credential is."""
    sent = {"model": "m", "messages": [], "input": "x", "prompt": "x", "max_tokens": 5}
    for path in ENDPOINTS:
        for line in (BEARER, f"x-api-key: {KEY}", f"api-key: {KEY}"):
            assert (await ask(gateway.port, post(sent, path, line))).status == 200, path
    assert a.hits == 3 * len(ENDPOINTS)
    for form in (KEY, digest(KEY), base64.b64encode(KEY.encode()).decode(), "authorization", "api-key"):
        assert form not in everything(a)
    await gateway.settled([a], sent=a.hits)


async def test_b101_the_backends_get_their_own_key(tmp_path: Path) -> None:
    """The pool's key, and nothing of the caller's."""
    tenants = {"t": {"keys": [{"sha256": DIGEST}]}}
    async with Fake(healthy) as fake:
        config = pool(fake.url, tenants=tenants, api_key="env:BACKEND_KEY")
        async with GatewayProcess(config, tmp_path, {"BACKEND_KEY": PASSWORD}) as gateway:
            gateway.secrets.append(PASSWORD)
            assert (await ask(gateway.port, chat(BEARER))).status == 200
            assert fake.requests[0].header("authorization") == f"Bearer {PASSWORD}"
            assert KEY not in everything(fake)
            await gateway.settled([fake], sent=1)


SECRETS = [
    "Cookie: session=s3cret-one",
    "Cookie: s3cret-two",
    "Proxy-Authorization: Basic s3cret-three",
    "x-goog-api-key: s3cret-four",
    "X-Forwarded-Authorization: s3cret-five",
]


@pytest.mark.parametrize("line", [BEARER, f"X-Api-Key: {KEY}", f"API-Key: {KEY}"])
async def test_b102_no_credential_passes(gateway: GatewayProcess, a: Fake, line: str) -> None:
    """The key in each header that takes one, other secrets in all the others and in the query: none gets through."""
    path = "/v1/chat/completions?key=s3cret-six&api%5Fkey=s3cret-seven&x=1"
    assert (await ask(gateway.port, chat(line, *SECRETS, path=path))).status == 200
    assert "s3cret" not in everything(a)
    assert KEY not in everything(a)
    assert a.requests[0].target == "/v1/chat/completions?x=1"
    await gateway.settled([a], sent=1)


PAIRS = {
    "the same in two": ([BEARER, f"x-api-key: {KEY}"], 200),
    "the same in three": ([BEARER, f"x-api-key: {KEY}", f"api-key: {KEY}"], 200),
    "two tenants": ([BEARER, f"x-api-key: {OTHER}"], 401),
    "one good, one unknown": ([BEARER, "x-api-key: hr-unknown"], 401),
    "one good, one empty": ([BEARER, "x-api-key: "], 401),
    "one good, one of another scheme": (["Authorization: Basic eDp5", f"x-api-key: {KEY}"], 401),
    "twice the same header": ([BEARER, BEARER], 401),
    "one header, two keys": ([f"x-api-key: {KEY}", f"x-api-key: {OTHER}"], 401),
    "a list": ([f"{BEARER}, Bearer {OTHER}"], 401),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/models"])
async def test_b102_keys_that_differ_are_refused(gateway: GatewayProcess, a: Fake, path: str) -> None:
    """Documented: several headers must say the same. The same rule on every route."""
    for name, (lines, status) in PAIRS.items():
        request = chat(*lines, path=path)
        if path == "/v1/models":
            request = "\r\n".join([f"GET {path} HTTP/1.1", "Host: g", *lines, "", ""]).encode()
        assert (await ask(gateway.port, request)).status == status, name
    await gateway.settled([a])


def refused(response: Response) -> None:
    assert response.status == 401
    assert response.header("www-authenticate") == "Bearer"
    assert response.error() == {
        "message": REFUSED,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


BAD_KEYS = {
    "unknown": b"hr-unknown-6f1d2c3b4a596877",
    "expired": EXPIRED.encode(),
    "a beginning of a good one": KEY[:-1].encode(),
    "a good one and more": KEY.encode() + b"x",
    "upper case": KEY.upper().encode(),
    "10 kB": b"hr-" + b"0123456789abcdef" * 640,
    "not ASCII": "hr-schlüssel-schlüssel".encode(),
    "not UTF-8": b"hr-\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7",
    "control characters": b"hr-\x01\x02\x03key-with-controls",
    "carriage return": b"hr-key-with\rreturn-in-it",
    "line feed": b"hr-key-with\nX-Injected: yes",
    "NUL": b"hr-key-with\0nul-in-it-and-more",
}


async def test_b103_keys_are_not_told_back(gateway: GatewayProcess, a: Fake) -> None:
    """Unknown, expired, malformed: not eight characters of them in an answer, in the log or in the metrics."""
    for name, key in BAD_KEYS.items():
        for header in (b"Authorization: Bearer ", b"x-api-key: "):
            request = chat("X-Key").replace(b"X-Key", header + key)
            response = await ask(gateway.port, request)
            assert response.status in (400, 401), name
            told = repr(response)
            for start in range(3, min(len(key), 40) - 8):
                assert key[start : start + 8].decode("latin-1") not in told, name
    await gateway.eventually(lambda: gateway.log, "it is logged")
    seen = gateway.log + (await gateway.get("/metrics")).text
    for key in BAD_KEYS.values():
        for start in range(3, min(len(key), 40) - 8):
            assert key[start : start + 8].decode("latin-1") not in seen
    assert a.hits == 0
    await gateway.settled([a])


MALFORMED = {
    "missing": [],
    "no scheme": [f"Authorization: {KEY}"],
    "scheme alone": ["Authorization: Bearer"],
    "scheme and blank": ["Authorization: Bearer "],
    "another scheme": [f"Authorization: Basic {KEY}"],
    "no blank": [f"Authorization: Bearer{KEY}"],
    "another separator": [f"Authorization: Bearer:{KEY}"],
    "quoted": [f'Authorization: Bearer "{KEY}"'],
    "empty": ["Authorization: "],
    "empty key": ["x-api-key: "],
    "two": [BEARER, f"Authorization: Bearer {OTHER}"],
    "not ASCII": ["Authorization: Bearer \u00fc\u00fc\u00fc"],
    "unknown": ["Authorization: Bearer hr-unknown"],
    "expired": [f"Authorization: Bearer {EXPIRED}"],
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_b104_all_refusals_are_alike(gateway: GatewayProcess, a: Fake, path: str) -> None:
    """B104 and B106: missing, malformed, unknown and expired keys get one and the same 401 with WWW-Authenticate."""
    for name, lines in MALFORMED.items():
        request = chat(*lines, path=path)
        if path == "/v1/models":
            request = "\r\n".join([f"GET {path} HTTP/1.1", "Host: g", *lines, "", ""]).encode()
        response = await ask(gateway.port, request)
        try:
            refused(response)
        except AssertionError:
            pytest.fail(f"{name}: {response}")
    assert a.hits == 0
    await gateway.settled([a])


async def test_b104_messages_have_the_shape_of_their_dialect(gateway: GatewayProcess, a: Fake) -> None:
    """On Anthropic's path the same refusal is an authentication_error."""
    response = await ask(gateway.port, chat(path="/v1/messages"))
    assert response.status == 401
    assert response.json()["error"] == {"type": "authentication_error", "message": REFUSED}
    await gateway.settled([a], sent=1)


async def test_b104_time_tells_nothing(gateway: GatewayProcess, a: Fake) -> None:
    """A key that shares all but its last character with a good one takes as long as one that shares none."""
    near = chat(f"Authorization: Bearer {KEY[:-1]}~", "Content-Length: 0").partition(b"{")[0]
    far = chat(f"Authorization: Bearer {'~' * len(KEY)}", "Content-Length: 0").partition(b"{")[0]
    times: dict[bytes, list[float]] = {near: [], far: []}
    async with RawClient(gateway.port) as client:
        for _ in range(1000):
            for request, taken in times.items():
                begun = time.perf_counter()
                assert (await client.ask(request)).status == 401
                taken.append(time.perf_counter() - begun)
    assert abs(statistics.median(times[near]) - statistics.median(times[far])) < 0.001
    await gateway.settled([a], sent=2000)


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "BeArEr", "Bearer ", "Bearer  "])
async def test_b106_the_scheme_has_no_case(gateway: GatewayProcess, a: Fake, scheme: str) -> None:
    """RFC 9110: schemes are case-insensitive. More blanks than one are taken, too."""
    assert (await ask(gateway.port, chat(f"Authorization: {scheme} {KEY}"))).status == 200
    await gateway.settled([a], sent=1)


async def test_b105_urls_with_credentials_are_refused(tmp_path: Path) -> None:
    """Neither user nor password nor query: the gateway does not start, and its report does not repeat them."""
    for number, url in enumerate(["http://u:s3cret-one@127.0.0.1:9/", "http://127.0.0.1:9/?key=s3cret-two"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        gateway = GatewayProcess(pool(url), folder)
        with pytest.raises(AssertionError):
            async with gateway:
                pass
        assert "pools.p.backends[0].url" in gateway.log
        assert "s3cret" not in gateway.log


async def test_b105_credentials_of_backends_stay_here(tmp_path: Path) -> None:
    """The backend refuses, answers 500, breaks off, and sends bad chunks: its key and its address are in no answer, its
    key in no log line and no metric."""
    cut = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    bad = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    pieces = [b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", cut, bad, b"no HTTP at all\r\n\r\n", b""]

    async def script(connection: FakeConnection) -> None:
        request = await connection.request()
        assert request.header("authorization") == f"Bearer {PASSWORD}"
        await connection.send(pieces.pop(0))

    async with Fake(script) as fake:
        config = pool(fake.url, api_key="env:BACKEND_KEY")
        async with GatewayProcess(config, tmp_path, {"BACKEND_KEY": PASSWORD}) as gateway:
            gateway.secrets.append(PASSWORD)
            answers = [await ask(gateway.port, chat(stream=stream)) for stream in (False, False, False, False, True)]
            await fake.stop()
            answers.append(await ask(gateway.port, chat()))
            await fake.start()
            assert [response.status for response in answers] == [500, 502, 502, 502, 502, 502]
            for response in answers:
                assert PASSWORD not in repr(response)
                assert str(fake.port) not in repr(response.body) + repr(response.headers)
            await gateway.settled([fake], sent=6)


@pytest.mark.parametrize("stream", [False, True])
async def test_b105_errors_in_a_stream_name_no_backend(gateway: GatewayProcess, a: Fake, stream: bool) -> None:
    """A break in mid-answer is told without the address of who broke."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        if stream:
            await connection.stream_head()
            await connection.chunk(event("one"))
        else:
            await connection.head(content_type="application/json", content_length="10000")
            await connection.send(completion())
        connection.reset()

    await a.play(script)
    response = await ask(gateway.port, chat(BEARER, stream=stream))
    assert str(a.port) not in repr(response.body) + repr(response.headers)
    assert "127.0.0.1" not in repr(response.body) + repr(response.headers)
    await gateway.settled([a], sent=1)
