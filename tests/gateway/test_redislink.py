"""The way to Redis, before servers that answer oddly: nobody waits for ever, and nothing stops for good."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.redislink import Link, Target
from gateway.resp import Incomplete, read
from gateway.sharedstore import SharedStore
from gateway.stores import StoreAway
from policies.limits import Kind, Limit

pytestmark = pytest.mark.anyio

NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"
RATE = Limit(Kind.REQUESTS, 60, 60)
Answer = Callable[[list[bytes]], bytes | None]


class Odd:
    """A server that answers by `answer`; None: like one that is no cluster, and has room for everybody."""

    def __init__(self) -> None:
        self.answer: Answer = lambda command: None
        self.heard: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        try:
            while piece := await reader.read(65536):
                data += piece
                while data:
                    try:
                        command, at = read(data, 0)
                    except Incomplete:
                        break
                    data = data[at:]
                    self.heard.append(command[0])
                    writer.write(self.answer(command) or usual(command))
        finally:
            writer.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


def usual(command: list[bytes]) -> bytes:
    if command[0] not in (b"EVAL", b"EVALSHA"):
        return NO_CLUSTER if command[0] == b"CLUSTER" else b"+OK\r\n"
    keys = int(command[2])
    requests = int(command[3 + keys + 3])
    numbers = [b":1000000\r\n:0\r\n:0\r\n"] * keys + [b":1\r\n"] * requests
    return b"*%d\r\n%b" % (3 * keys + requests, b"".join(numbers))


def slots(*nodes: tuple[int, int, bytes, int]) -> bytes:
    """What CLUSTER SLOTS says."""
    told = [
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n%b:%d\r\n$2\r\nid\r\n" % (first, last, host, port)
        for first, last, host, port in nodes
    ]
    return b"*%d\r\n%b" % (len(nodes), b"".join(told))


LOCAL, UNKNOWN = b"$9\r\n127.0.0.1\r\n", b"$-1\r\n"


@asynccontextmanager
async def odd(number: int = 1) -> AsyncIterator[list[Odd]]:
    async with AsyncExitStack() as stack:
        found = [Odd() for _ in range(number)]
        for each in found:
            listener = await asyncio.start_server(each.serve, "127.0.0.1", 0)
            each.port = listener.sockets[0].getsockname()[1]
            stack.callback(listener.close)
        yield found


def store_at(url: str, on_failure: Any = "local_share") -> SharedStore:
    return SharedStore(url, on_failure, lambda: int(time.monotonic() * 1e6), replica="one")


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("reply", [b"$-1\r\n", b"+OK\r\n", b"*0\r\n", b"*4\r\n" + b"$1\r\n1\r\n" * 4, b"*1\r\n:1\r\n"])
async def test_a_reply_that_is_none_of_the_scripts_leaves_nobody_waiting(reply: bytes) -> None:
    """The operator's choice decides, and the store is tried again beside the requests."""
    async with odd() as [server], store_at(server.url) as store:
        account = store.account("t", [RATE], None)
        server.answer = lambda command: reply if command[0] == b"EVALSHA" else None
        verdict = account.take([(0, RATE.cost(1))])
        assert isinstance(verdict, asyncio.Future)
        async with asyncio.timeout(1):
            assert await verdict is None  # of the own share
        assert store.mode == "local_share"
        await store._beat()  # nor is the beat's own call the end of it
        server.answer = lambda command: None
        await eventually(lambda: store.mode == "shared")


async def test_a_node_that_does_not_know_its_address_is_where_it_was_asked() -> None:
    """As with `cluster-preferred-endpoint-type unknown-endpoint`."""
    async with odd() as [server]:
        server.answer = lambda command: slots((0, 16383, UNKNOWN, server.port)) if command[0] == b"CLUSTER" else None
        async with store_at(server.url) as store:
            assert store.mode == "shared"
            assert store.link._slots


async def test_slots_that_moved_between_nodes_that_are_up_are_learned_anew() -> None:
    """One call is redirected, those after the next look go to the right node at once."""
    async with odd(2) as [old, new]:
        nodes = [(0, 8191, LOCAL, old.port), (8192, 16383, LOCAL, new.port)]
        old.answer = lambda command: slots(*nodes) if command[0] == b"CLUSTER" else None
        async with store_at(old.url) as store:
            key = "foo"  # slot 12182
            assert store.link._node(key) is not store.link._node("bar")  # slot 5061
            nodes[:] = [(0, 16383, LOCAL, old.port)]
            new.answer = lambda command: b"-MOVED 12182 127.0.0.1:%d\r\n" % old.port
            assert await store.link.run([key], ["me", 1, 1, 1]) == [1000000, 0, 0, 1]
            await eventually(lambda: store.link._node(key) is store.link._node("bar"))


async def test_a_slot_under_way_is_asked_for_with_nobody_in_between() -> None:
    """ASKING holds for one command only: of many at once each comes right behind its own."""
    async with odd(2) as [old, new]:
        old.answer = lambda command: (
            slots((0, 8191, LOCAL, new.port), (8192, 16383, LOCAL, old.port))
            if command[0] == b"CLUSTER"
            else b"-ASK 12182 127.0.0.1:%d\r\n" % new.port
            if command[0] == b"EVALSHA"
            else None
        )
        new.answer = lambda command: (
            b"-MOVED 12182 127.0.0.1:%d\r\n" % old.port
            if command[0] == b"EVALSHA" and new.heard[-2] != b"ASKING"
            else None
        )
        async with store_at(old.url) as store:
            calls = [store.link.run(["foo"], ["me", 1, 1, 1]) for _ in range(20)]
            assert await asyncio.gather(*calls) == [[1000000, 0, 0, 1]] * 20
            assert store.calls["refused"] == 0


async def test_a_tenant_whose_keys_are_on_the_move_is_alone_with_that() -> None:
    """Its node goes on for the others."""
    async with odd() as [server], store_at(server.url) as store:
        server.answer = lambda command: (
            b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n" if b"moving" in command else None
        )
        with pytest.raises(StoreAway):
            await store.link.run(["moving"], ["me", 1, 1, 1])
        assert await store.link.run(["other"], ["me", 1, 1, 1]) == [1000000, 0, 0, 1]


@pytest.mark.parametrize("reply", [b"-MOVED 1\r\n", b"-MOVED\r\n", b"-ASK 1 here\r\n"])
async def test_a_redirection_to_nowhere_is_a_refusal(reply: bytes) -> None:
    """As any other error is."""
    async with odd() as [server]:
        link = Link(Target.of(server.url), "return {}", [0, "me", 1, 1, 0])
        await link.watch()
        server.answer = lambda command: reply
        with pytest.raises(StoreAway):
            await link.run(["foo"], ["me", 1, 1, 1])
        link.close()


async def test_a_name_that_nobody_can_look_up_is_a_store_that_is_away() -> None:
    """The gateway serves all the same."""
    async with store_at("redis://redis..svc:6379") as store:
        assert store.mode == "local_share"


async def test_a_password_stands_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Who does not know AUTH repeats what it was told; a Target shows none either."""
    async with odd() as [server]:
        server.answer = lambda command: (
            b"-ERR unknown command 'AUTH', with args beginning with: '%b'\r\n" % command[1]
            if command[0] == b"AUTH"
            else None
        )
        url = server.url.replace("redis://", "redis://:hunter2@")
        async with store_at(url) as store:
            assert "unknown command" in store.link.why
            assert "unknown command" in caplog.text
            assert "hunter2" not in caplog.text + store.link.why + repr(store) + repr(Target.of(url))


async def test_leases_are_renewed_though_a_node_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for it takes a second each time; the leases with the others lapse after eight."""
    async with odd() as [server], store_at(server.url) as store:

        async def searching() -> None:
            await asyncio.sleep(1.0)

        monkeypatch.setattr(store.link, "watch", searching)
        server.heard.clear()
        await asyncio.sleep(3.2)
        assert b"EVALSHA" in server.heard
