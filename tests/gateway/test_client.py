"""The client of one request: its body against the limits, its headers and its query on the way to a backend, and its
leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway import client as module
from gateway.client import SMALL_BODY, Buffers, Client
from gateway.connection import Connection, HeadLimits
from gateway.errors import ClientGone, GatewayError, Unavailable
from gateway.exchange import Call, Endpoint, Header
from gateway.turn import Turn
from tests.path.house import Wire

ENDPOINT = Endpoint("/v1/x")
LIMIT = 1000


def connect(infer: Callable[[Turn], Awaitable[None]]) -> Wire:
    """A client comes."""
    config = uvicorn.Config(infer, interface="asgi3", loop="none", ws="none", lifespan="off", log_config=None)
    targets: Any = {ENDPOINT.target: ENDPOINT}
    return Wire(Connection(config, ServerState(), {}, limits=HeadLimits(), endpoints=targets, infer=infer))  # type: ignore[arg-type]


class Case:
    """One request: what it brings, and what a test does with it."""

    def __init__(self, buffers: Buffers | None = None, body_s: float = 60.0) -> None:
        self.body_s = body_s
        self.buffers = buffers or Buffers(10_000)
        self.results: list[Any] = []
        self.wire = self._connect()

    def _connect(self) -> Wire:
        async def infer(turn: Turn) -> None:
            with Client(turn, buffers=self.buffers, max_body=LIMIT, body_s=self.body_s, clock=time.monotonic) as client:
                try:
                    self.results.append(await client.body())
                    self.results.append(self.buffers.used)
                except GatewayError as error:
                    self.results.append(error)
            turn.answer(b"HTTP/1.1 200 OK\r\n", b"")

        return connect(infer)

    async def sends(self, *pieces: bytes) -> Case:
        for piece in pieces:
            self.wire.feed(piece)
            await settle()
        return self

    @property
    def reason(self) -> str:
        """Why the body was refused."""
        assert isinstance(self.results[0], GatewayError), self.results
        return self.results[0].refusal.reason


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST /v1/x HTTP/1.1", b"Host: g", *lines, b"", b""])


@pytest.mark.anyio
@pytest.mark.parametrize("cut", [0, 1, 5, 10])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_is_read_whole_and_held_meanwhile(cut: int, chunked: bool) -> None:
    """With its head or behind it; its bytes count against the budget until the request is over."""
    data = b"5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n" if chunked else b"0123456789"
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 10"
    case = await Case().sends(head(framing) + data[:cut], data[cut:])
    assert case.results == [b"0123456789", 10]
    assert case.buffers.used == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("lines", "data", "reason"),
    [
        ([b"Content-Length: 1001"], b"", "request_too_large"),
        ([b"Transfer-Encoding: chunked"], b"3e9\r\n" + b"x" * 1001, "request_too_large"),
        ([b"Transfer-Encoding: chunked"], b"1f4\r\n" + b"x" * 500 + b"\r\n1f5\r\n" + b"x" * 501, "request_too_large"),
        ([b"Content-Length: 5", b"Content-Encoding: gzip"], b"", "unsupported_encoding"),
        ([b"Content-Length: 5", b"Content-Encoding: identity, br"], b"", "unsupported_encoding"),
        ([b"Content-Length: 5", b"Content-Type: a/b", b"Content-Type: c/d"], b"", "invalid_request"),
        ([b"Content-Length: 5", b"Host: h"], b"", "invalid_request"),
        ([b"Transfer-Encoding: chunked"], b"zz", "invalid_request"),
        ([b"Transfer-Encoding: chunked"], b"1\r\nx\r\nzz", "invalid_request"),
    ],
)
async def test_bodies_that_are_refused(lines: list[bytes], data: bytes, reason: str) -> None:
    """By what the head says, before anything is read; or at the byte that is one too many or no HTTP."""
    case = await Case().sends(head(*lines), data)
    assert case.reason == reason
    assert case.buffers.used == 0


@pytest.mark.anyio
async def test_the_largest_body_passes() -> None:
    """Exactly the limit, declared or chunked."""
    for framing, data in ((b"Content-Length: 1000", b"x" * 1000), (b"Transfer-Encoding: chunked", b"3e8\r\n")):
        body = data if len(data) > 5 else data + b"x" * 1000 + b"\r\n0\r\n\r\n"
        assert (await Case().sends(head(framing), body)).results == [b"x" * 1000, 1000]


@pytest.mark.anyio
async def test_a_body_that_pauses_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first byte or in the middle: 408, and its place in the buffers is free."""
    monkeypatch.setattr(module, "BODY_STALL_S", 0.05)
    cases = [await Case().sends(head(b"Content-Length: 10") + came) for came in (b"", b"01234")]
    await asyncio.sleep(0.2)
    assert [case.reason for case in cases] == ["request_timeout"] * 2
    assert [case.buffers.used for case in cases] == [0, 0]


@pytest.mark.anyio
async def test_a_body_that_trickles_is_given_up() -> None:
    """However often a byte of it comes."""
    case = Case(body_s=0.2)
    await case.sends(head(b"Content-Length: 1000"))
    async with asyncio.timeout(10):
        while not case.results:
            await case.sends(b"x")
            await asyncio.sleep(0.01)
    assert case.reason == "request_timeout" and "was not complete after 0.2 s" in str(case.results[0])
    assert case.buffers.used == 0


@pytest.mark.anyio
async def test_a_client_that_leaves_with_its_body_unsent() -> None:
    """Nobody is told, and nothing is kept."""
    case = await Case().sends(head(b"Content-Length: 10") + b"01234")
    case.wire.leave()
    await settle()
    assert isinstance(case.results[0], ClientGone)
    assert case.buffers.used == 0


@pytest.mark.anyio
async def test_bodies_share_one_budget() -> None:
    """What does not fit is refused with a time to return, and fits when another one is gone."""
    buffers = Buffers(100)
    begun = await Case(buffers).sends(head(b"Content-Length: 90") + b"x" * 80)
    refused = await Case(buffers).sends(head(b"Content-Length: 30") + b"x" * 30)
    assert isinstance(refused.results[0], Unavailable)
    assert (refused.reason, refused.results[0].retry_after) == ("buffers_full", 1.0)
    begun.wire.leave()
    await settle()
    again = await Case(buffers).sends(head(b"Content-Length: 30") + b"x" * 30)
    assert again.results == [b"x" * 30, 30]


@given(st.lists(st.tuples(st.integers(1, 3 * SMALL_BODY), st.integers(1, 3)), max_size=30), st.integers(1, 2**23))
def test_the_budget_is_never_passed(bodies: list[tuple[int, int]], budget: int) -> None:
    """Whatever grows and ends: the sum stays within the budget, large bodies within three quarters of it, and all that
    was taken can be given back."""
    buffers = Buffers(budget)
    held: list[int] = []
    for size, parts in bodies:
        taken = 0
        try:
            for part in range(1, parts + 1):
                count = size * part // parts - taken
                buffers.take(count, taken + count)
                taken += count
                assert taken <= SMALL_BODY or buffers.used <= budget * 3 // 4
        except Unavailable:
            pass
        held.append(taken)
        assert buffers.used == sum(held) <= budget
        if len(held) > 3:
            buffers.give(held.pop(0))
    for taken in held:
        buffers.give(taken)
    assert buffers.used == 0


def addressed(headers: Iterable[Header], query: bytes = b"") -> Call:
    """The call as it goes to a backend."""

    class Parser:
        def get_http_version(self) -> str:
            return "1.1"

        def should_keep_alive(self) -> bool:
            return True

    carrier: Any = SimpleNamespace(parser=Parser(), transport=None, headers=list(headers))
    turn = Turn(carrier, ENDPOINT, query, expects_continue=False)
    call = Call(ENDPOINT, "m", "m", "p", [b""])
    return Client(turn, buffers=Buffers(1), max_body=1, body_s=60.0, clock=lambda: 0.0).address(call, "req_1")


OURS = [(b"accept-encoding", b"identity"), (b"x-request-id", b"req_1")]


@pytest.mark.parametrize(
    "name",
    b"authorization x-api-key api-key x-goog-api-key cookie host content-length transfer-encoding connection te "
    b"trailer upgrade keep-alive proxy-authorization proxy-connection expect accept-encoding x-request-id forwarded "
    b"x-real-ip x-forwarded-for x-forwarded-proto x-headrace-class x-headrace-anything x-stainless-lang x-gateway-x "
    b"x-envoy-x x-llm-d-x x-smg-x x-data-parallel-rank x-custom-labels endpoint-load-metrics-format "
    b"x-prefiller-host-port x-prefiller-url x-encoder-hosts-ports x-encoder-host-ports x-data-parallel-host-port "
    b"x-kv-cache-source-host-port x-dynamo-request-priority".split(),
)
def test_headers_that_stay_here(name: bytes) -> None:
    """Credentials, framing, and what steers this gateway or another router."""
    assert addressed([(name, b"1"), (b"x-kept", b"2")]).headers == [(b"x-kept", b"2"), *OURS]


def test_headers_that_pass() -> None:
    """In their order, repeated ones too, values byte for byte."""
    kept = [(b"user-agent", b"x"), (b"x-a", b"\xff\x80 "), (b"x-a", b""), (b"openai-organization", b"o")]
    kept += [(b"traceparent", b"00-1"), (b"anthropic-version", b"2023-06-01"), (b"x-stain", b"1"), (b"accept", b"*/*")]
    assert addressed(kept).headers == [*kept, *OURS]


def test_headers_that_connection_names_stay_here() -> None:
    """In every Connection header, in any case."""
    headers = [(b"connection", b"close, X-One"), (b"x-one", b"1"), (b"x-two", b"2"), (b"connection", b" x-two ")]
    assert addressed([*headers, (b"x-three", b"3")]).headers == [(b"x-three", b"3"), *OURS]


@pytest.mark.parametrize(
    ("query", "target"),
    [
        (b"", b"/v1/x"),
        (b"a=1&b=%20&a=2", b"/v1/x?a=1&b=%20&a=2"),
        (b"key=s", b"/v1/x"),
        (b"a&KEY=s&Api-Key=s&b", b"/v1/x?a&b"),
        (b"%6bey=s&a=1&api%5fkey=s", b"/v1/x?a=1"),
        (b"key", b"/v1/x"),
        (b"keys=1&akey=2&a=key=s", b"/v1/x?keys=1&akey=2&a=key=s"),
        (b"&&", b"/v1/x?&&"),
    ],
)
def test_the_target(query: bytes, target: bytes) -> None:
    """The query as sent, but for parameters that hold keys."""
    assert addressed([], query).target == target


@given(st.lists(st.tuples(st.sampled_from([b"key", b"%6Bey", b"x", b"token", b""]), st.binary(max_size=4)), max_size=5))
def test_no_secret_passes_in_any_query(items: list[tuple[bytes, bytes]]) -> None:
    """What passes is what was sent, in order, without the secrets."""
    query = b"&".join(name + b"=" + value.replace(b"&", b"") for name, value in items)
    target = addressed([], query).target
    kept = [item for item in query.split(b"&") if item.startswith((b"x=", b"="))]
    assert target == (b"/v1/x?" + b"&".join(kept) if kept and query else b"/v1/x")


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({b"x-headrace-deadline": b"1500ms"}, 1.5),
        ({b"x-headrace-deadline": b"2s", b"x-stainless-read-timeout": b"600.0"}, 2.0),
        ({b"x-stainless-read-timeout": b"600", b"x-stainless-timeout": b"30"}, 30.0),
        ({b"x-headrace-deadline": b"soon"}, None),
        ({b"x-headrace-deadline": b"-1"}, None),
        ({b"x-headrace-deadline": b"0"}, None),
        ({b"x-headrace-deadline": b"9" * 50}, None),
        ({b"x-headrace-deadline": b"\xff"}, None),
    ],
)
def test_how_long_a_client_waits(headers: dict[bytes, bytes], wait_s: float | None) -> None:
    """The least of what it says and what its SDK tells of its clocks; nonsense says nothing."""
    assert addressed(headers.items()).deadline_s == wait_s


def presence(run: Callable[[Client], Awaitable[None]]) -> list[str]:
    """What happened to a request whose client is watched."""
    told: list[str] = []

    async def infer(turn: Turn) -> None:
        client = Client(turn, buffers=Buffers(10), max_body=10, body_s=60.0, clock=lambda: 0.0)
        try:
            await run(client)
            told.append("done")
        except ClientGone:
            told.append("gone")
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def main() -> None:
        wire = connect(infer)
        wire.feed(head(b"Content-Length: 0"))
        await settle()
        wire.leave()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    return told


def test_leaving_cancels_what_is_watched_and_nothing_else() -> None:
    """In the block it ends the wait as ClientGone; behind it nothing comes."""

    async def waits(client: Client) -> None:
        async with client.present():
            await asyncio.sleep(10)

    async def waits_outside(client: Client) -> None:
        async with client.present():
            pass
        await asyncio.sleep(0.02)

    async def comes_late(client: Client) -> None:
        await asyncio.sleep(0.02)
        async with client.present():
            raise AssertionError("it is gone")

    assert presence(waits) == ["gone"]
    assert presence(waits_outside) == ["done"]
    assert presence(comes_late) == ["gone"]
