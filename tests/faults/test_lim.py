"""Rate limits, token accounting, Redis. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server, started
from tests.contract.servers import valkey as valkey_binary
from tests.faults.fakes import DONE, Fake, FakeConnection, Script, completion, event, healthy, streaming, usage_event
from tests.faults.process import DIGEST, FULL, KEY, GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio

BEARER = f"Authorization: Bearer {KEY}"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A store that replicas share; each test leaves other keys in it."""
    with started("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A cluster."""
    with started("valkey cluster", tmp_path_factory.mktemp("cluster")) as server:
        yield server


@pytest.fixture
async def empty(valkey: Server) -> Server:
    """The same, with nothing in it."""
    await valkey.ask("FLUSHALL")
    return valkey


def answering(prompt: int, output: int, *, hold_s: float = 0.0) -> Script:
    """Whole answers that report this usage, after a while."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await asyncio.sleep(hold_s)
            await connection.answer(completion(prompt=prompt, output=output))

    return script


def limited(fake: Fake, store: Server | None = None, **limits: Any) -> dict[str, Any]:
    """One tenant with these limits."""
    config = pool(fake.url, concurrency=256, tenants={"t": {"keys": [{"sha256": DIGEST}], "limits": limits}})
    return config | ({"state": {"url": store.url}} if store is not None else {})


@asynccontextmanager
async def replicas(
    count: int, config: dict[str, Any], folder: Path, **environ: str
) -> AsyncIterator[list[GatewayProcess]]:
    """Gateways with the same configuration that have met in the store; the environment is the last one's."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            own = folder / f"replica{number}"
            own.mkdir()
            process = GatewayProcess(config, own, environ if number == count - 1 else None)
            found.append(await stack.enter_async_context(process))
        await asyncio.sleep(2.5)  # the first of them learns of the last one at its next beat, every two seconds
        yield found


async def round_robin(gateways: Sequence[GatewayProcess], count: int, **fields: Any) -> list[Response]:
    """All at once."""
    return await asyncio.gather(*(ask(gateways[i % len(gateways)].port, chat(BEARER, **fields)) for i in range(count)))


def statuses(responses: Sequence[Response]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for response in responses:
        counts[response.status] = counts.get(response.status, 0) + 1
    return counts


def refused(response: Response, type_: str) -> int:
    """A 429 as it has to be; how long to wait, in milliseconds."""
    error = response.error()
    assert (response.status, error["type"], error["code"]) == (429, type_, "rate_limit_exceeded")
    assert "Limit" in error["message"] and "Used" in error["message"] and "Requested" in error["message"]
    after = int(response.header("retry-after") or "")
    exact_ms = int(response.header("retry-after-ms") or "")
    assert 1 <= after <= 60
    assert after == max(1, math.ceil(exact_ms / 1000))
    return exact_ms


@pytest.mark.parametrize("stream", [True, False])
async def test_b087_streams_are_charged(tmp_path: Path, stream: bool) -> None:
    """Six hundred tokens each of a thousand a minute: the third one is refused, streamed or not."""
    events = streaming(event("x"), event(finish="stop"), usage_event(590, 10), DONE)
    async with (
        Fake(events if stream else answering(590, 10)) as fake,
        GatewayProcess(limited(fake, tokens_per_minute=1000), tmp_path) as gateway,
    ):
        request = chat(BEARER, stream=stream)
        assert [(await ask(gateway.port, request)).status for _ in range(2)] == [200, 200]
        refused(await ask(gateway.port, request), "tokens")
        assert fake.hits == 2
        await gateway.idle([fake])


async def test_b087_a_stream_without_usage_is_charged_as_counted(tmp_path: Path) -> None:
    """What the gateway saw of it, and its estimate of the prompt."""
    events = streaming(*[event("x")] * 300, event(finish="stop"), DONE)
    async with (
        Fake(events) as fake,
        GatewayProcess(limited(fake, tokens_per_minute=1000), tmp_path) as gateway,
    ):
        for spent in (300, 600, 900):
            assert (await ask(gateway.port, chat(BEARER, stream=True))).status == 200
            response = await ask(gateway.port, chat(BEARER, max_tokens=5000))
            assert 1000 - spent - 30 <= int(response.header("x-ratelimit-remaining-tokens") or "") <= 1000 - spent


async def test_b088_prompts_are_charged(tmp_path: Path) -> None:
    """Nine hundred tokens of prompt and one of output: there is no room for a second one."""
    async with (
        Fake(answering(900, 1)) as fake,
        GatewayProcess(limited(fake, tokens_per_minute=1000), tmp_path) as gateway,
    ):
        request = chat(BEARER, messages=[{"role": "user", "content": "word " * 720}])
        assert (await ask(gateway.port, request)).status == 200
        refused(await ask(gateway.port, request), "tokens")
        assert await gateway.metric("headrace_tokens_total", direction="input") == 900
        assert await gateway.metric("headrace_tokens_total", direction="output") == 1


async def test_b089_replicas_share_a_limit_on_requests(empty: Server, tmp_path: Path) -> None:
    """Ninety at once before three replicas: thirty are let through."""
    async with (
        Fake(healthy) as fake,
        replicas(3, limited(fake, empty, requests_per_minute=30), tmp_path) as gateways,
    ):
        counts = statuses(await round_robin(gateways, 90))
        assert 29 <= counts[200] <= 31
        assert counts[200] + counts[429] == 90
        assert fake.hits == counts[200]


async def test_b089_replicas_share_a_limit_on_tokens(empty: Server, tmp_path: Path) -> None:
    """Each may use a hundred of three thousand."""
    async with (
        Fake(answering(10, 90, hold_s=0.5)) as fake,
        replicas(3, limited(fake, empty, tokens_per_minute=3000), tmp_path) as gateways,
    ):
        counts = statuses(await round_robin(gateways, 90, max_tokens=90))
        assert 29 <= counts[200] <= 31


async def test_b089_replicas_share_a_limit_on_requests_at_once(empty: Server, tmp_path: Path) -> None:
    """Never more than three at the backend, and again three once they have ended."""
    most = 0

    async def counting(connection: FakeConnection) -> None:
        nonlocal most
        while True:
            await connection.request()
            most = max(most, fake.open_requests)
            await asyncio.sleep(1.0)
            await connection.answer(completion())

    async with (
        Fake(counting) as fake,
        replicas(3, limited(fake, empty, concurrent=3), tmp_path) as gateways,
    ):
        for _ in range(2):
            counts = statuses(await round_robin(gateways, 90))
            assert counts == {200: 3, 429: 87}
            await asyncio.sleep(0.2)
        assert most == 3


async def test_b090_requests_that_come_together_are_charged_before_they_run(tmp_path: Path) -> None:
    """Of fifty with up to five hundred tokens each at most two run; then what they really used counts."""
    async with (
        Fake(answering(8, 92, hold_s=1.0)) as fake,
        GatewayProcess(limited(fake, tokens_per_minute=1000), tmp_path) as gateway,
    ):
        counts = statuses(await round_robin([gateway], 50, max_tokens=480))
        assert 1 <= counts[200] <= 2
        after = await ask(gateway.port, chat(BEARER, max_tokens=100))
        left = int(after.header("x-ratelimit-remaining-tokens") or "")
        spent = 100 * counts[200] + 100 + 9
        assert 1000 - spent <= left <= 1000 - spent + 60  # a thousand a minute come back meanwhile


async def test_b091_a_small_limit_lets_the_first_request_through(tmp_path: Path) -> None:
    """Without max_tokens no constant stands in for it; what can never fit is told so, and not to be tried again."""
    async with (
        Fake(answering(5, 7)) as fake,
        GatewayProcess(limited(fake, tokens_per_minute=100), tmp_path) as gateway,
    ):
        for _ in range(5):
            assert (await ask(gateway.port, chat(BEARER))).status == 200
        response = await ask(gateway.port, chat(BEARER, max_tokens=5000))
        error = response.error()
        assert (response.status, error["type"], error["code"]) == (429, "tokens", "request_exceeds_limit")
        assert "Limit 100, Requested 50" in error["message"]
        assert response.header("x-should-retry") == "false"
        assert response.header("retry-after") is None
        assert fake.hits == 5


async def test_b093_every_key_expires(empty: Server, tmp_path: Path) -> None:
    """Within two windows; after some idle time nothing runs any more that would keep a key alive."""
    limits = {"requests_per_minute": 60, "tokens_per_minute": 6000, "concurrent": 4, "burst": "5%"}
    async with Fake(healthy) as fake:
        config = limited(fake, empty, **limits, models={"m": limits})
        async with replicas(2, config, tmp_path) as gateways:
            for _ in times(300, 3):
                await round_robin(gateways, 20)
                await asyncio.sleep(1.0)
            keys = await empty.ask("KEYS", "*")
            assert 4 <= len([key for key in keys if b"{t}" in key]) <= 6  # those of what runs may be gone already
            for key in keys:
                assert 0 < await empty.ask("PTTL", key) <= 120_000
            if FULL:
                await asyncio.sleep(120)
            deadline = time.monotonic() + 40
            while [key for key in await empty.ask("KEYS", "*") if b"{t}" in key]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)


async def test_b095_without_the_store_replicas_share_what_there_is(tmp_path: Path) -> None:
    """A third of the limit each; the metrics say so, and the log once."""
    with started("valkey", tmp_path) as store:
        async with (
            Fake(healthy) as fake,
            replicas(3, limited(fake, store, requests_per_minute=30), tmp_path) as gateways,
        ):
            store.kill()
            responses = await round_robin(gateways, 300)
            counts = statuses(responses)
            assert 27 <= counts[200] <= 33
            assert counts[200] + counts[429] == 300
            for gateway in gateways:
                await shows_and_says_once(gateway, "local_share", "store is away")


async def test_metrics_tell_what_is_used_and_who_decided(empty: Server, tmp_path: Path) -> None:
    """What a lease covers is decided here, the rest with a round trip; what is used stands beside the limit."""
    async with (
        Fake(healthy) as fake,
        GatewayProcess(limited(fake, empty, requests_per_minute=600, concurrent=8), tmp_path) as gateway,
    ):
        for _ in range(30):
            assert (await ask(gateway.port, chat(BEARER))).status == 200
        decided = {
            where: await gateway.metric("headrace_limiter_decision_seconds_count", where=where)
            for where in ("here", "store")
        }
        assert sum(decided.values()) == 30 and min(decided.values()) >= 1
        assert await gateway.metric("headrace_tenant_limit", tenant="t", kind="requests") == 600
        assert await gateway.metric("headrace_tenant_limit", tenant="t", kind="concurrent") == 8
        used = await gateway.metric("headrace_tenant_used", tenant="t", kind="requests")
        assert 15 <= used <= 60  # some of it drains, and leases are taken for used
        assert await gateway.metric("headrace_tenant_used", tenant="t", kind="concurrent") <= 8


async def shows_and_says_once(gateway: GatewayProcess, mode: str, words: str) -> None:
    async def shows() -> bool:
        return await gateway.metric("headrace_limiter_mode", mode=mode) == 1

    await gateway.eventually(shows, "the mode shows")
    await gateway.eventually(lambda: words in gateway.log, "it is logged")
    assert gateway.log.count(words) == 1
    assert await gateway.metric("headrace_limiter_mode") == 1


async def test_b096_a_cluster_serves_every_tenant(three_nodes: Server, tmp_path: Path) -> None:
    """Two hundred tenants, whose keys lie on three nodes; three limits each, and three models."""
    names = [f"t{number}" for number in range(200)]
    limits = {"requests_per_minute": 3, "tokens_per_minute": 6000, "concurrent": 3}
    async with Fake(healthy) as fake:
        models = {model: {"pool": "p"} for model in "abc"}
        told = {"limits": limits | {"models": {model: {"requests_per_minute": 2} for model in models}}}
        tenants = {
            name: {"keys": [{"sha256": hashlib.sha256(f"hr-{name}".encode()).hexdigest()}]} | told for name in names
        }
        config = pool(fake.url, concurrency=256, tenants=tenants, models={"m": {"pool": "p"}} | models)
        config |= {"state": {"url": three_nodes.url}, "security": {"secret": "env:SALTS"}}
        async with GatewayProcess(config, tmp_path, {"SALTS": "of-the-tests"}) as gateway:

            async def load(name: str) -> list[int]:
                bearer = f"Authorization: Bearer hr-{name}"
                return [(await ask(gateway.port, chat(bearer, model=model))).status for model in "aaabc"]

            for batch in range(0, 200, 20):
                for found in await asyncio.gather(*map(load, names[batch : batch + 20])):
                    assert found == [200, 200, 429, 200, 429]
            assert await gateway.metric("headrace_limiter_calls_total", outcome="refused") == 0
            assert await gateway.metric("headrace_limiter_mode", mode="shared") == 1


async def test_b097_lost_scripts_and_a_lost_store_are_made_up_for(tmp_path: Path) -> None:
    """No 5xx, and limits hold on: after SCRIPT FLUSH, after a restart with nothing, and where SCRIPT is not allowed."""
    store = Server(*_renamed(tmp_path))
    store.start()
    try:
        async with (
            Fake(healthy) as fake,
            GatewayProcess(limited(fake, store, requests_per_minute=40), tmp_path) as gateway,
        ):
            assert statuses(await round_robin([gateway], 20)) == {200: 20}
            await store.ask("HIDDEN", "FLUSH")
            assert statuses(await round_robin([gateway], 10)) == {200: 10}
            store.kill()
            store.start()
            await asyncio.sleep(1.0)
            counts = statuses(await round_robin([gateway], 60))
            assert counts[200] <= 13  # what was left, and what came back meanwhile: not forty again
            assert set(counts) <= {200, 429}
            assert await gateway.metric("headrace_limiter_mode", mode="shared") == 1
    finally:
        store.kill()


def _renamed(folder: Path) -> tuple[str, Path, tuple[str, ...]]:
    return valkey_binary(), folder, ("--rename-command", "SCRIPT", "HIDDEN")


async def test_b098_whoever_comes_again_as_told_is_served(tmp_path: Path) -> None:
    """No more than the limit and the burst in any minute, and a whole number of seconds after which there is room."""
    async with (
        Fake(healthy) as fake,
        GatewayProcess(limited(fake, requests_per_minute=60, burst="20%"), tmp_path) as gateway,
    ):
        begun = time.monotonic()
        let = statuses(await round_robin([gateway], 30))[200]
        for _ in times(20, 3):
            while (response := await ask(gateway.port, chat(BEARER))).status == 200:
                let += 1
            wait_ms = refused(response, "requests")
            assert wait_ms <= 1000
            await asyncio.sleep(int(response.header("retry-after") or ""))
            assert (await ask(gateway.port, chat(BEARER))).status == 200
            let += 1
            while (response := await ask(gateway.port, chat(BEARER))).status == 200:
                let += 1
            await asyncio.sleep(int(response.header("retry-after-ms") or "") / 1000)
            assert (await ask(gateway.port, chat(BEARER))).status == 200
            let += 1
        assert let <= 12 + (time.monotonic() - begun) + 1


AHEAD = """
import time
wall, monotonic = time.time, time.monotonic
time.time, time.monotonic = lambda: wall() + 90, lambda: monotonic() + 90
"""


async def test_b099_clocks_that_differ_do_not_matter(empty: Server, tmp_path: Path) -> None:
    """One replica's clocks are 90 s ahead."""
    (tmp_path / "sitecustomize.py").write_text(AHEAD)
    async with Fake(healthy) as fake:
        config = limited(fake, empty, requests_per_minute=30)
        async with replicas(2, config, tmp_path, PYTHONPATH=f"{tmp_path}:{Path.cwd()}") as gateways:
            responses = await round_robin(gateways, 90)
            assert 29 <= statuses(responses)[200] <= 31
            for response in responses:
                assert 0 <= int(response.header("x-ratelimit-remaining-requests") or "") <= 30
                if response.status == 429:
                    assert refused(response, "requests") <= 60_000


async def test_b100_nothing_is_kept_of_unknown_callers(empty: Server, tmp_path: Path) -> None:
    """Keys that nobody has, and users that a tenant names: neither memory nor keys in the store grow with them."""
    async with Fake(healthy) as fake:
        config = limited(fake, empty, requests_per_minute=1_000_000, tokens_per_minute=1_000_000_000)
        async with GatewayProcess(config, tmp_path) as gateway:

            async def ask_on(client: RawClient, start: int, count: int, *, known: bool) -> None:
                for number in range(start, start + count):
                    key = BEARER if known else f"Authorization: Bearer hr-unknown-{number}"
                    response = await client.ask(chat(key, user=f"user-{number}"))
                    assert response.status == (200 if known else 401)

            async def flood(total: int, *, known: bool) -> None:
                async with AsyncExitStack() as stack:
                    clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(10)]
                    each = total // 10
                    await asyncio.gather(
                        *(ask_on(client, i * each, each, known=known) for i, client in enumerate(clients))
                    )

            await flood(500, known=False)
            await flood(500, known=True)
            before = gateway.rss
            await flood(200_000 if FULL else 4_000, known=False)
            await flood(50_000 if FULL else 2_000, known=True)
            assert gateway.rss - before < 20 * 2**20
            assert len(await empty.ask("KEYS", "*")) < 100
