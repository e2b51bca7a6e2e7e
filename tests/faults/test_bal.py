"""Where requests go: balance, affinity, and that one tenant's prompts tell another nothing. Each test is named by its
public case."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy, silent
from tests.faults.process import GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, Response, ask, chat
from tests.faults.test_que import auth, tenants, working

pytestmark = pytest.mark.anyio

TOKEN_BYTES = 4


def prompt(name: str, tokens: int) -> list[dict[str, str]]:
    """A conversation of so many tokens, another one for each name from its first byte on."""
    text = hashlib.sha256(name.encode()).hexdigest() * (tokens * TOKEN_BYTES // 64 + 1)
    return [{"role": "user", "content": text[: tokens * TOKEN_BYTES]}]


def shares(fakes: Sequence[Fake]) -> list[float]:
    whole = sum(fake.hits for fake in fakes)
    return [fake.hits / whole for fake in fakes]


async def fleet(stack: AsyncExitStack, count: int, script: Any = healthy, ports: Sequence[int] = ()) -> list[Fake]:
    return [await stack.enter_async_context(Fake(script, port=(*ports, *[0] * count)[i])) for i in range(count)]


async def at_once(gateway: GatewayProcess, requests: Sequence[bytes], most: int) -> list[Response]:
    """All requests, so many at a time."""
    places = asyncio.Semaphore(most)

    async def one(request: bytes) -> Response:
        async with places:
            return await ask(gateway.port, request)

    return await asyncio.gather(*map(one, requests))


async def test_b067_what_was_aborted_is_not_counted_and_a_restart_draws_no_crowd(tmp_path: Path) -> None:
    """300 aborted requests, one backend restarts, 300 new ones: each backend has its third, give or take a third."""
    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 3, silent)
        gateway = await stack.enter_async_context(
            GatewayProcess(pool(*(fake.url for fake in fakes), concurrency=64), tmp_path)
        )
        for batch in range(10):
            clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(30)]
            for number, client in enumerate(clients):
                await client.send(chat(messages=prompt(f"aborted {batch} {number}", 100)))
            await asyncio.sleep(0.1)
            for client in clients:
                client.reset()
        await gateway.idle(fakes)
        for fake in fakes:
            await fake.play(working(0.02))
        await fakes[1].stop()
        await fakes[1].start()
        requests = [chat(messages=prompt(f"new {number}", 500)) for number in range(300)]
        assert {response.status for response in await at_once(gateway, requests, 30)} == {200}
        assert all(0.23 <= share <= 0.43 for share in shares(fakes)), shares(fakes)
        await gateway.settled(fakes)


async def test_b068_one_after_the_other_go_everywhere(tmp_path: Path) -> None:
    """600 requests in sequence to an idle pool, with prompts long enough to have a favourite and without, and again
    after a pause: each backend gets its share, and no gauge is ever negative."""
    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 3)
        gateway = await stack.enter_async_context(GatewayProcess(pool(*(fake.url for fake in fakes)), tmp_path))
        for tokens in (500, 10):
            for fake in fakes:
                fake.requests.clear()
            async with RawClient(gateway.port) as client:
                for number in range(600):
                    assert (await client.ask(chat(messages=prompt(f"{tokens} {number}", tokens)))).status == 200
            assert all(0.25 <= share <= 0.42 for share in shares(fakes)), shares(fakes)
            await gateway.idle(fakes)  # which looks at the gauges
        await gateway.settled(fakes)


async def crowd(tmp_path: Path, routing: str) -> tuple[list[float], list[int], list[int]]:
    """64 at a time, nine in ten with one prefix of 4k tokens, before four backends with eight places each. Returns the
    TTFTs of those, the most in flight on each backend, and where three at a time of the same prefix went."""
    most: Counter[str] = Counter()
    open_: Counter[str] = Counter()

    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 4)

        def script(fake: Fake) -> Any:
            async def serve(connection: FakeConnection) -> None:
                while True:
                    await connection.request()
                    open_[fake.url] += 1
                    most[fake.url] = max(most[fake.url], open_[fake.url])
                    await asyncio.sleep(0.02)
                    await connection.stream_head()
                    await connection.chunk(event("t0"))
                    await asyncio.sleep(0.1)
                    await connection.chunk(event(finish="stop") + DONE)
                    await connection.last_chunk()
                    open_[fake.url] -= 1

            return serve

        for fake in fakes:
            await fake.play(script(fake))
        config = pool(*(fake.url for fake in fakes), concurrency=8, routing=routing)
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        shared = prompt("popular", 4000)[0]["content"]

        def request(number: int, *, alone: bool) -> bytes:
            head = prompt(f"own {number}", 4000)[0]["content"] if alone else shared
            return chat(stream=True, messages=[{"role": "user", "content": f"{head} {number}"}])

        ttfts: list[float] = []

        async def one(number: int, places: asyncio.Semaphore) -> None:
            async with places, RawClient(gateway.port) as client:
                begun = time.monotonic()
                await client.send(request(number, alone=number % 10 == 0))
                response = await client.response(until=b"t0")
                if number % 10:
                    ttfts.append(time.monotonic() - begun)
                await client.read(response)
                assert response.body.endswith(DONE)

        places = asyncio.Semaphore(64)
        await asyncio.gather(*(one(number, places) for number in range(256)))
        await gateway.idle(fakes)
        for fake in fakes:
            fake.requests.clear()
        shared = prompt("less popular", 4000)[0]["content"]
        assert (await ask(gateway.port, request(1000, alone=False))).status == 200  # from now on somebody owns it
        calm = [request(1001 + number, alone=False) for number in range(60)]
        assert {response.status for response in await at_once(gateway, calm, 3)} == {200}
        found = [fake.hits for fake in fakes]
        await gateway.idle(fakes)
        return ttfts, [most[fake.url] for fake in fakes], found


async def test_b070_a_popular_prefix_neither_drowns_its_backend_nor_loses_it(tmp_path: Path) -> None:
    """Under pressure all four are busy, none beyond its places or half more than the mean, and a TTFT of the popular
    prefix is at most twice that of a policy of least load (the tenth that is cold goes behind it by the order of the
    queue: shortest prefill first); at ease nearly all go to one backend."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ttfts, most, calm = await crowd(tmp_path / "a", "price")
    assert max(most) <= 8
    assert max(most) <= 1.5 * sum(most) / 4 and min(most) > 0, most
    assert max(calm) >= 0.9 * sum(calm), calm
    plain, _, _ = await crowd(tmp_path / "b", "least_tokens")
    assert sorted(ttfts)[int(0.95 * len(ttfts))] <= 2 * sorted(plain)[int(0.95 * len(plain))] + 0.2


async def test_b071_a_full_backend_does_not_end_affinity_for_the_others(tmp_path: Path) -> None:
    """C is full of long streams; prompts that A and B own go on going to their owners, and none to C."""
    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 3)
        config = pool(*(fake.url for fake in fakes), concurrency=8)
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        names = [f"p{number}" for number in range(60)]
        owners: dict[str, Fake] = {}
        for name in names:
            before = [fake.hits for fake in fakes]
            await ask(gateway.port, chat(messages=prompt(name, 2000)))
            owners[name] = next(fake for fake, hits in zip(fakes, before, strict=True) if fake.hits > hits)
        owned = [name for name in names if owners[name] is not fakes[2]][:20]
        pins = [name for name in names if owners[name] is fakes[2]][:8]
        await fakes[2].play(silent)
        for name in pins:
            client = await stack.enter_async_context(RawClient(gateway.port))
            await client.send(chat(stream=True, messages=prompt(name, 2000)))
            await asyncio.sleep(0.05)
        await gateway.eventually(lambda: fakes[2].hits == len(pins) == 8, "C is full")
        right = 0
        for number in range(len(times(400, 200))):
            name = owned[number % len(owned)]
            hits = owners[name].hits
            assert (await ask(gateway.port, chat(messages=prompt(name, 2000)))).status == 200
            right += owners[name].hits - hits
        assert right >= 0.95 * len(times(400, 200))
        assert fakes[2].hits == 8


async def test_b072_a_burst_is_split_evenly(tmp_path: Path) -> None:
    """100 requests at one moment before two idle backends: half and half, give or take ten."""
    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 2, working(0.3))
        config = pool(*(fake.url for fake in fakes), concurrency=128)
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        requests = [chat(messages=prompt(f"p{number}", 300)) for number in range(100)]
        assert {response.status for response in await at_once(gateway, requests, 100)} == {200}
        assert abs(fakes[0].hits - 50) <= 10, [fake.hits for fake in fakes]
        await gateway.settled(fakes)


async def test_b073_owners_stay_when_backends_come_and_go(tmp_path: Path) -> None:
    """Who owns a prefix is the same after a restart and on another replica; a fifth backend takes over its fifth, and
    gives it back."""
    names = [f"p{number}" for number in range(len(times(1000, 400)))]

    async def owners(gateway: GatewayProcess) -> list[int]:
        for fake in fakes:
            fake.requests.clear()
        async with RawClient(gateway.port) as client:
            for name in names:
                assert (await client.ask(chat(messages=prompt(name, 400), user=name))).status == 200
        found = {request.json()["user"]: number for number, fake in enumerate(fakes) for request in fake.requests}
        return [found[name] for name in names]

    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 5)
        urls = [fake.url for fake in fakes]
        maps = []
        for number in (4, 5, 4):
            async with GatewayProcess(pool(*urls[:number]), tmp_path) as gateway:
                maps.append(await owners(gateway))
        four, five, again = maps
        moved = sum(a != b for a, b in zip(four, five, strict=True))
        assert 0.1 * len(names) <= moved <= 0.3 * len(names)
        assert all(b == 4 for a, b in zip(four, five, strict=True) if a != b)
        assert sum(a == b for a, b in zip(four, again, strict=True)) >= 0.99 * len(names)


async def test_b074_a_backend_that_died_is_not_the_favourite_of_its_prompts(tmp_path: Path) -> None:
    """Prefix P lives on one backend, which resets in mid-stream and then refuses. The next 20 with P all succeed, the
    failure is counted once, and so they do when it is back."""

    async def dying(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("t0"))
        connection.reset()

    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 2)
        gateway = await stack.enter_async_context(GatewayProcess(pool(*(fake.url for fake in fakes)), tmp_path))
        request = chat(stream=True, messages=prompt("P", 3000))
        assert (await ask(gateway.port, request)).status == 200
        dead = next(fake for fake in fakes if fake.hits)
        await dead.play(dying)
        broken = await ask(gateway.port, request)
        assert b'"error"' in broken.body and not broken.body.endswith(DONE)
        await dead.stop()
        dead.requests.clear()
        for _ in range(20):
            assert (await ask(gateway.port, request)).body.endswith(DONE)
        assert dead.hits == 0
        dead.script = healthy
        await dead.start()
        for _ in range(20):
            assert (await ask(gateway.port, request)).body.endswith(DONE)
        assert (await gateway.outcomes())["ok"] == 41
        assert sum((await gateway.outcomes()).values()) == 42
        await gateway.settled(fakes)


async def test_b075_nobody_names_a_cache_but_the_gateway(tmp_path: Path) -> None:
    """A client sends the salt that another tenant's requests carry, at every place: it never arrives; salts differ by
    tenant, do not change with the key or the route, and there is none where there is no identity."""
    routes = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

    def salt(request: bytes) -> Any:
        return json.loads(request).get("cache_salt")

    async with Fake(healthy) as fake:
        config = pool(fake.url, models={"m": {"pool": "p"}}) | tenants(tmp_path, a={}, b={})
        async with GatewayProcess(config, tmp_path) as gateway:
            found: dict[str, set[Any]] = {"a": set(), "b": set()}
            for tenant in found:
                for number in range(2):
                    for path in routes:
                        body = {"prompt": "x", "input": "x", "max_tokens": 5}
                        assert (await ask(gateway.port, chat(auth(tenant, number), path=path, **body))).status == 200
                        found[tenant].add(salt(fake.requests[-1].body))
            assert len(found["a"]) == len(found["b"]) == 1
            assert found["a"].isdisjoint(found["b"]) and None not in found["a"] | found["b"]
            stolen = found["a"].pop()
            for fields in (
                {"cache_salt": stolen},
                {"extra_body": {"cache_salt": stolen}},
                {"extra_key": stolen},
            ):
                for path in routes:
                    assert (await ask(gateway.port, chat(auth("b"), path=path, prompt="x", **fields))).status == 200
                    assert stolen.encode() not in fake.requests[-1].body
                    assert {salt(fake.requests[-1].body)} == found["b"]
            await gateway.settled([fake])
    async with Fake(healthy) as fake, GatewayProcess(pool(fake.url), tmp_path) as gateway:
        for fields in ({}, {"cache_salt": "mine"}):
            assert (await ask(gateway.port, chat(**fields))).status == 200
            assert salt(fake.requests[-1].body) is None
        await gateway.settled([fake])


async def test_b077_where_one_tenants_prompts_went_tells_another_nothing(tmp_path: Path) -> None:
    """A warms 300 prefixes on 8 backends, B sends the same: where B's go has nothing to do with A's, and no answer
    names a backend or a hit."""
    names = [f"p{number}" for number in range(len(times(300, 150)))]
    async with AsyncExitStack() as stack:
        fakes = await fleet(stack, 8)
        config = pool(*(fake.url for fake in fakes)) | tenants(tmp_path, a={}, b={})
        gateway = await stack.enter_async_context(GatewayProcess(config, tmp_path))
        went: dict[str, list[int]] = {}
        for tenant in ("a", "b"):
            for fake in fakes:
                fake.requests.clear()
            for name in Random(tenant).sample(names, len(names)):
                response = await ask(gateway.port, chat(auth(tenant), messages=prompt(name, 2000), user=name))
                assert response.status == 200
                for header, value in response.headers:
                    assert header not in ("x-headrace-backend", "x-headrace-cache")
                    assert not any(str(fake.port) in value for fake in fakes)
            found = {r.json()["user"]: number for number, fake in enumerate(fakes) for r in fake.requests}
            went[tenant] = [found[name] for name in names]
        same = sum(a == b for a, b in zip(went["a"], went["b"], strict=True))
        assert same <= 0.25 * len(names), same  # one in eight by chance; 3.5 sigma of 150
        await gateway.settled(fakes)
