"""The emulator's HTTP server: framing, keeping and dropping connections, and what is no HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from loadtests.emulator import Emulator, Server, Settings
from tests.loadtests.conftest import RawClient, chat

pytestmark = pytest.mark.anyio


async def test_requests_on_one_connection_are_answered_in_order(server: Server) -> None:
    """Two sent at once, the slow one first: the answers do not overtake each other."""
    async with await RawClient.open(server) as client:
        client.send("/v1/chat/completions", chat(max_tokens=30, ignore_eos=True))
        client.send("/version", method="GET")
        first, second = await client.answer(), await client.answer()
    assert json.loads(first[2])["object"] == "chat.completion"
    assert json.loads(second[2]) == {"version": "0.32.0"}


async def test_a_request_may_come_byte_by_byte(server: Server) -> None:
    """Cut anywhere, head and body."""
    body = json.dumps({"prompt": "é"}).encode()
    raw = b"POST /tokenize?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with await RawClient.open(server) as client:
        for byte in raw:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        status, _, _ = await client.answer()
    assert status == 200


async def test_a_chunked_request_is_read(server: Server) -> None:
    """Cut into chunks anywhere."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = head + b'4\r\n{"pr\r\na\r\nompt":"a"}\r\n0\r\n\r\n'
    async with await RawClient.open(server) as client:
        client.writer.write(raw)
        status, _, found = await client.answer()
    assert (status, json.loads(found)["count"]) == (200, 1)


async def test_a_client_that_expects_100_gets_it_before_the_body(server: Server) -> None:
    """Only then does it send the body."""
    async with await RawClient.open(server) as client:
        client.writer.write(b"POST /tokenize HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 14\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b'{"prompt":"a"}')
        assert (await client.answer())[0] == 200


async def test_a_head_has_no_body(server: Server) -> None:
    """HEAD tells the length and sends nothing; the connection goes on."""
    async with await RawClient.open(server) as client:
        client.send("/version", method="HEAD")
        status, headers = await client.head()
        client.send("/version", method="GET")
        _, _, body = await client.answer()
    assert (status, int(headers["content-length"])) == (200, len(body))


async def test_what_is_no_http_is_refused(server: Server) -> None:
    """A plain 400, and the connection ends."""
    async with await RawClient.open(server) as client:
        client.writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 400 Bad Request")


@pytest.mark.parametrize("version_and_header", [("HTTP/1.0", ""), ("HTTP/1.1", "connection: close\r\n")])
async def test_a_client_that_does_not_keep_the_connection_sees_it_end(
    server: Server, version_and_header: tuple[str, str]
) -> None:
    """The answer says so, and FIN follows."""
    version, header = version_and_header
    async with await RawClient.open(server) as client:
        client.writer.write(f"GET /version {version}\r\nhost: a\r\n{header}\r\n".encode())
        _, headers, _ = await client.answer()
        assert headers["connection"] == "close"
        assert await client.rest() == b""


async def test_an_idle_connection_is_closed_after_its_time_and_a_busy_one_is_not() -> None:
    """As uvicorn does after five seconds; here after a tenth of one."""
    loop = asyncio.get_running_loop()
    async with Emulator(Settings(keep_alive_s=0.1, speed=4)).serve() as server, await RawClient.open(server) as client:
        client.send("/v1/chat/completions", chat(max_tokens=200, ignore_eos=True))
        start = loop.time()
        assert (await client.answer())[0] == 200
        busy_s = loop.time() - start
        assert await client.rest() == b""
        assert busy_s > 0.2
        assert 0.09 < loop.time() - start - busy_s < 4  # uvicorn's five seconds would be too long
