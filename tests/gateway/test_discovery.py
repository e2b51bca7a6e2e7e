"""Backends found in DNS and in Kubernetes, against a name server and an API server that speak the real protocols."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.discovery import Cluster, Dns, Endpoint, Kubernetes, Source, Undiscoverable, allowed
from loadtests.nameserver import Mood, name_server
from tests.path.house import AtAwait

pytestmark = pytest.mark.anyio


class Watching:
    """`async with Watching(source) as seen`: `seen.last` is what was told last."""

    def __init__(self, source: Source) -> None:
        self.told: list[list[Endpoint]] = []
        self._source = source

    async def __aenter__(self) -> Watching:
        self._task = asyncio.create_task(self._source.watch(self.told.append))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def last(self) -> list[Endpoint] | None:
        return self.told[-1] if self.told else None

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert not self._task.done(), self._task
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [2, 4])
async def test_a_search_ends_though_an_answer_comes_with_its_end(n: int) -> None:
    """The addresses of one kind are awaited first, those of the other kind then. Nothing is told any more, and whoever
    ends the search does not wait for ever."""
    async with name_server() as server:
        server.zone = {("vllm.svc", "A"): (30, ["10.0.0.1"]), ("vllm.svc", "AAAA"): (30, ["fd00::1"])}
        told: list[list[Endpoint]] = []

        async def search() -> None:
            task = asyncio.current_task()
            assert task is not None
            await AtAwait(Dns("vllm.svc", 8000, server.address).watch(told.append), n, task.cancel, late=True)

        task = asyncio.create_task(search())
        await asyncio.wait([task], timeout=2.0)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert ended and told == []


async def test_dns_follows_the_records_when_their_time_is_over() -> None:
    """A and AAAA together; a change within the TTL; an emptied name is nobody."""
    async with name_server() as server:
        server.zone = {
            ("vllm.svc", "A"): (1, ["10.0.0.2", "10.0.0.1"]),
            ("vllm.svc", "AAAA"): (1, ["fd00::1"]),
        }
        async with Watching(Dns("vllm.svc", 8000, server.address)) as seen:
            first = [Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000), Endpoint("fd00::1", 8000)]
            await seen.until(lambda: seen.last == first)
            server.zone["vllm.svc", "A"] = (1, ["10.0.0.3"])
            await seen.until(lambda: seen.last == [Endpoint("10.0.0.3", 8000), Endpoint("fd00::1", 8000)])
            server.zone = {("vllm.svc", "A"): (1, [])}
            await seen.until(lambda: seen.last == [])


@pytest.mark.parametrize("mood", [Mood.SILENT, Mood.FAILS])
async def test_dns_that_does_not_know_changes_nothing(mood: Mood) -> None:
    """Who is known stays known, whether nobody answers or somebody says that he cannot tell."""
    async with name_server() as server:
        server.zone = {("vllm.svc", "A"): (1, ["10.0.0.1"])}
        async with Watching(Dns("vllm.svc", 8000, server.address)) as seen:
            await seen.until(lambda: seen.last)
            server.mood, asked = mood, server.asked
            await seen.until(lambda: server.asked > asked + 1)
            assert seen.last == [Endpoint("10.0.0.1", 8000)]
            server.mood = Mood.ANSWERS
            server.zone["vllm.svc", "A"] = (1, ["10.0.0.9"])
            await seen.until(lambda: seen.last == [Endpoint("10.0.0.9", 8000)])


async def test_srv_records_bring_their_ports() -> None:
    """Each target with its own."""
    async with name_server() as server:
        server.zone = {
            ("_vllm._tcp.svc", "SRV"): (1, ["0 0 8001 a.svc.", "0 0 8002 b.svc."]),
            ("a.svc", "A"): (1, ["10.0.0.1"]),
            ("b.svc", "A"): (1, ["10.0.0.2"]),
        }
        async with Watching(Dns("_vllm._tcp.svc", 1, server.address)) as seen:
            await seen.until(lambda: seen.last == [Endpoint("10.0.0.1", 8001), Endpoint("10.0.0.2", 8002)])


def test_no_backend_is_where_credentials_are_handed_out() -> None:
    """Whatever a name server says."""
    hosts = ("169.254.169.254", "fe80::1", "0.0.0.0", "10.0.0.1", "10.0.0.1")
    assert allowed(Endpoint(host, 80) for host in hosts) == [Endpoint("10.0.0.1", 80)]


def piece(name: str, *endpoints: dict[str, Any], version: str = "1") -> dict[str, Any]:
    """An EndpointSlice."""
    metadata = {"name": name, "resourceVersion": version, "labels": {"kubernetes.io/service-name": "vllm"}}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints)}


def at(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


class ApiServer:
    """EndpointSlices as Kubernetes serves them: lists with a version, watches from a version on, 410 for versions
    before `oldest`, and a token. `emit` changes the state and tells who watches; `quiet` does it behind their back."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version, self.oldest = 10, 0
        self.token = "secret"
        self.lists = self.watches = 0
        self.refused = 0
        self.hasty = ""  # what it does to every watch at once: `fails`, `ends`, or the event that it sends
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._watching: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def emit(self, kind: str, item: dict[str, Any]) -> None:
        event = self.quiet(kind, item)
        for writer in self._watching:
            self._send(writer, event)

    def quiet(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            self.slices.pop(item["metadata"]["name"], None)
        elif kind != "BOOKMARK":
            self.slices[item["metadata"]["name"]] = item
        event = {"type": kind, "object": item}
        self._history.append((self.version, event))
        return event

    def fail(self, code: int) -> None:
        """End every watch by an error event."""
        for writer in self._watching:
            self._send(writer, {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "too old"}})
            writer.write(b"0\r\n\r\n")
            writer.close()
        self._watching.clear()

    def drop(self) -> None:
        """Break every watch."""
        for writer in self._watching:
            writer.transport.abort()
        self._watching.clear()

    @staticmethod
    def _send(writer: asyncio.StreamWriter, event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                self._answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._watching.discard(writer)
            writer.close()

    def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(head.split(" ")[1])
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        assert url.path == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        assert asked["labelSelector"] == "kubernetes.io/service-name=vllm"
        if f"authorization: bearer {self.token}" not in head.lower():
            self.refused += 1
            self._whole(writer, 401, {"kind": "Status", "code": 401})
        elif "watch" not in asked:
            self.lists += 1
            metadata = {"resourceVersion": str(self.version)}
            self._whole(
                writer, 200, {"kind": "EndpointSliceList", "metadata": metadata, "items": [*self.slices.values()]}
            )
        elif int(asked["resourceVersion"]) < self.oldest:
            self._whole(writer, 410, {"kind": "Status", "code": 410})
        else:
            self.watches += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            for version, event in self._history:
                if version > int(asked["resourceVersion"]):
                    self._send(writer, event)
            self._watching.add(writer)
            if self.hasty == "fails":
                self.fail(500)
            elif self.hasty == "ends":
                writer.write(b"0\r\n\r\n")
            elif self.hasty:
                self._send(writer, json.loads(self.hasty))

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
        )
        writer.write(data)


@asynccontextmanager
async def following(server: ApiServer, folder: Path) -> AsyncIterator[Watching]:
    token = folder / "token"
    token.write_text("secret\n")
    async with server.serve() as url:
        source = Kubernetes(Cluster(url, token), "models", "vllm", 8000, Random(1))
        async with Watching(source) as seen:
            yield seen


def hosts(endpoints: list[Endpoint] | None) -> dict[str, bool]:
    return {each.host: each.ready for each in endpoints or []}


async def test_kubernetes_lists_and_watches(tmp_path: Path) -> None:
    """Slices are merged; ready takes work, terminating only finishes, unready is gone; absent conditions mean ready."""
    server = ApiServer()
    server.slices["s1"] = piece("s1", at("10.0.0.1", ready=True), at("10.0.0.2", ready=False, serving=False))
    server.slices["s2"] = piece("s2", at("10.0.0.1", ready=True), {"addresses": ["10.0.0.3"]})
    async with following(server, tmp_path) as seen:
        await seen.until(lambda: hosts(seen.last) == {"10.0.0.1": True, "10.0.0.3": True})
        await seen.until(lambda: server.watches == 1)
        leaving = at("10.0.0.3", ready=False, serving=True, terminating=True)
        server.emit("MODIFIED", piece("s2", leaving))
        await seen.until(lambda: hosts(seen.last) == {"10.0.0.1": True, "10.0.0.3": False})
        server.emit("BOOKMARK", piece("bookmark"))
        server.emit("DELETED", piece("s2"))
        await seen.until(lambda: hosts(seen.last) == {"10.0.0.1": True})
        server.emit("ADDED", piece("s3", at("10.0.0.4", ready=True)))
        await seen.until(lambda: hosts(seen.last) == {"10.0.0.1": True, "10.0.0.4": True})
        assert server.lists == 1


@pytest.mark.parametrize("how", ["event", "status", "break"])
async def test_kubernetes_lists_again_when_a_watch_broke(tmp_path: Path, how: str) -> None:
    """What was removed meanwhile leaves no ghost, whether the API server says that the version is too old, in the
    stream or by its status, or just breaks the connection."""
    server = ApiServer()
    server.slices["s1"] = piece("s1", at("10.0.0.1", ready=True))
    server.slices["s2"] = piece("s2", at("10.0.0.2", ready=True))
    async with following(server, tmp_path) as seen:
        await seen.until(lambda: server.watches == 1 and len(hosts(seen.last)) == 2)
        server.quiet("DELETED", piece("s2"))
        server._history.clear()
        if how == "status":
            server.oldest = server.version + 1
        server.fail(410) if how == "event" else server.drop()
        await seen.until(lambda: hosts(seen.last) == {"10.0.0.1": True})
        assert server.lists >= 2


@pytest.mark.parametrize("hasty", ["fails", "ends"])
async def test_kubernetes_is_not_asked_in_a_tight_loop(tmp_path: Path, hasty: str) -> None:
    """Though each watch fails or ends as soon as it begins."""
    server = ApiServer()
    server.hasty = hasty
    async with following(server, tmp_path) as seen:
        await seen.until(lambda: server.watches)
        await asyncio.sleep(1.0)
        assert server.watches <= 4


@pytest.mark.parametrize(
    "event", ["[]", "7", '{"type":"MODIFIED","object":[]}', '{"type":"ADDED","object":{"metadata":7}}']
)
async def test_json_of_another_shape_does_not_end_the_search(tmp_path: Path, event: str) -> None:
    """It is listed anew after a while."""
    server = ApiServer()
    server.hasty = event
    async with following(server, tmp_path) as seen:
        await seen.until(lambda: server.watches >= 2)
        server.hasty = ""
        server.slices["s1"] = piece("s1", at("10.0.0.1", ready=True))
        await seen.until(lambda: hosts(seen.last) == {"10.0.0.1": True})


async def test_kubernetes_reads_a_renewed_token(tmp_path: Path) -> None:
    """A refusal changes nothing that is known."""
    server = ApiServer()
    server.slices["s1"] = piece("s1", at("10.0.0.1", ready=True))
    async with following(server, tmp_path) as seen:
        await seen.until(lambda: server.watches == 1)
        server.token = "renewed"
        server.drop()
        await seen.until(lambda: server.refused)
        assert hosts(seen.last) == {"10.0.0.1": True}
        (tmp_path / "token").write_text("renewed")
        await seen.until(lambda: server.watches == 2)


def test_outside_of_a_cluster_it_says_so() -> None:
    """Before anything is served."""
    with pytest.raises(Undiscoverable, match="KUBERNETES_SERVICE_HOST"):
        Cluster.inside({})
    assert Cluster.inside({"KUBERNETES_SERVICE_HOST": "fd00::1"}).url == "https://[fd00::1]:443"
