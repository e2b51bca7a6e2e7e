"""Queues, classes and shares. Each test is named by its public case; times are a fifth of the case's own where it says
seconds of work, so that the ordinary suite can afford them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fakes import Fake, FakeConnection, Script, completion, healthy, silent
from tests.faults.process import DIGEST, FULL, GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio

WORK_S = 1.0 if FULL else 0.2  # what a job takes where a case says a second
SLACK_S = 0.5  # for a machine that others use too


def working(work_s: float) -> Script:
    """Answers every request after so much work."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await asyncio.sleep(work_s)
            await connection.answer(completion())

    return script


def key(tenant: str, number: int = 0) -> str:
    return f"hr-key-{number}-of-{tenant}-of-the-tests-of-queues"


def auth(tenant: str, number: int = 0) -> str:
    return f"Authorization: Bearer {key(tenant, number)}"


def tenants(folder: Path, **told: dict[str, Any]) -> dict[str, Any]:
    """The configuration of tenants with two keys each, and the secret that they need."""
    secret = folder / "secret"
    secret.write_text("of-the-tests-of-queues-and-of-nothing-else")
    found = {}
    for name, settings in told.items():
        digests = [hashlib.sha256(key(name, number).encode()).hexdigest() for number in range(2)]
        found[name] = {"keys": [{"sha256": digest} for digest in digests]} | settings
    found["tester"] = {"keys": [{"sha256": DIGEST}]}
    return {"tenants": found, "security": {"secret": f"file:{secret}"}}


async def open_loop(ask_one: Callable[[int], Awaitable[Response]], count: int, every_s: float) -> list[Response]:
    """Requests at a fixed pace, whatever becomes of them."""

    async def one(number: int) -> Response:
        await asyncio.sleep(number * every_s)
        return await ask_one(number)

    return await asyncio.gather(*(one(number) for number in range(count)))


async def test_b078_batch_is_not_starved_for_ever(tmp_path: Path) -> None:
    """Four jobs at a time; interactive work comes at twice what can be done, after 20 batch jobs were queued. Batch
    gets its floor, interactive waits no longer than its bound, and what is too much is refused and does not hang."""
    seconds = 60 * WORK_S
    count = int(2 * 4 * seconds / WORK_S / (1 if FULL else 2))
    classes = {"interactive": {"max_wait": "2s", "max_queued": 1000}, "batch": {"max_wait": "10m", "floor": "10%"}}
    ends: list[float] = []
    batch_tokens = {"max_tokens": 10, "service_tier": "flex"}

    async def batch() -> None:
        response = await ask(gateway.port, chat(**batch_tokens), timeout_s=300)
        assert (response.status, response.header("x-headrace-class")) == (200, "batch")
        ends.append(time.monotonic())

    async with Fake(working(WORK_S)) as a:  # noqa: SIM117
        async with GatewayProcess(pool(a.url, concurrency=4, classes=classes), tmp_path) as gateway:
            waiting = [asyncio.create_task(batch()) for _ in range(20)]
            await asyncio.sleep(0.1)
            begun = time.monotonic()
            answers = await open_loop(lambda _: ask(gateway.port, chat(max_tokens=10)), count, WORK_S / 8)
            rush_s = time.monotonic() - begun
            during = sum(end < begun + rush_s for end in ends)
            good = [answer for answer in answers if answer.status == 200]
            refused = [answer for answer in answers if answer.status == 503]
            assert len(good) + len(refused) == count
            assert during >= 0.05 * (during + len(good))
            assert len(good) >= 0.7 * 4 * rush_s / WORK_S  # and the rest of the capacity is interactive's
            for answer in refused:
                assert int(answer.header("retry-after") or 0) >= 1
            await asyncio.gather(*waiting)
            line_waits = [line["queue_ms"] for line in gateway.lines if line.get("class") == "interactive"]
            assert max(line_waits, default=0) < 2000 + 1000 * SLACK_S
            await gateway.settled([a], sent=count + 20)


async def flooded(tmp_path: Path, flood: Callable[[int], bytes]) -> None:
    """A queues 200 at once, B sends one per second of work: B waits three of them at most, and A gets the rest."""
    classes = {"interactive": {"max_wait": "5m", "max_queued": 1000}}
    config = tenants(tmp_path, a={}, b={})
    async with Fake(working(WORK_S)) as fake:  # noqa: SIM117
        async with GatewayProcess(pool(fake.url, concurrency=4, classes=classes) | config, tmp_path) as gateway:
            begun = time.monotonic()
            flooding = [asyncio.create_task(ask(gateway.port, flood(i), timeout_s=300)) for i in range(200)]
            await asyncio.sleep(0.5 * WORK_S)
            waits: list[float] = []

            async def one(_: int) -> Response:
                sent = time.monotonic()
                response = await ask(gateway.port, chat(auth("b")))
                waits.append(time.monotonic() - sent - WORK_S)
                return response

            answers = await open_loop(one, 30, WORK_S)
            assert [answer.status for answer in answers] == [200] * 30
            assert sorted(waits)[28] < 3 * WORK_S + SLACK_S
            assert [answer.status for answer in await asyncio.gather(*flooding)] == [200] * 200
            took = time.monotonic() - begun
            assert took < 1.2 * 230 * WORK_S / 4 + 2 * SLACK_S  # nothing was idle meanwhile
            await gateway.settled([fake], outcomes={"ok": 230})


async def test_b079_a_flood_leaves_other_tenants_their_share(tmp_path: Path) -> None:
    """One tenant's flood does not starve another of its class, and uses what that leaves."""
    await flooded(tmp_path, lambda number: chat(auth("a")))


async def test_b081_the_share_is_the_keys_owners_whatever_the_request_says(tmp_path: Path) -> None:
    """A new user, session and fairness id on every request, two keys of the one tenant: still one share."""

    def disguised(number: int) -> bytes:
        name = "X-Fairness-Id" if number % 2 else "x-fairness-id"
        lines = [f"{name}: {number}", f"x-session-id: s{number}", f"x-gateway-inference-fairness-id: f{number}"]
        return chat(auth("a", number % 2), *lines, user=f"user-{number}")

    await flooded(tmp_path, disguised)


JUMPS = (
    "X-Priority: interactive",
    "Priority: u=0",
    "x-gateway-inference-objective: critical",
    "x-headrace-class: interactive",
    "x-app: cli-bg",
)


async def test_b080_nothing_that_a_client_sends_jumps_the_queue(tmp_path: Path) -> None:
    """A tenant of batch only asks for more, by every header and field: it stays in its class, waits like its peers, and
    none of it reaches the backend."""
    config = tenants(tmp_path, low={"classes": ["batch"]}, high={"classes": ["interactive"]})
    order: list[str] = []

    async def one(name: str, request: bytes) -> Response:
        response = await ask(gateway.port, request, timeout_s=60)
        order.append(name)
        return response

    async with Fake(working(WORK_S)) as fake:  # noqa: SIM117
        async with GatewayProcess(pool(fake.url, concurrency=1) | config, tmp_path) as gateway:
            sent = [asyncio.create_task(one("first", chat(auth("high"))))]
            await gateway.eventually(lambda: fake.hits == 1, "the place is taken")
            pushy = chat(auth("low"), *JUMPS, priority=-100, service_tier="priority")
            for name, request in (
                ("peer", chat(auth("low"))),
                ("pushy", pushy),
                ("above", chat(auth("high"))),
            ):
                sent.append(asyncio.create_task(one(name, request)))
                await asyncio.sleep(0.05)
            answers = await asyncio.gather(*sent)
            assert order == ["first", "above", "peer", "pushy"]
            assert answers[2].header("x-headrace-class") == "batch"
            told = fake.requests[-1]
            assert "priority" not in told.json()
            steering = {"x-priority", "priority", "x-gateway-inference-objective", "x-headrace-class"}
            assert steering.isdisjoint(dict(told.headers))
            await gateway.settled([fake], outcomes={"ok": 4})


@pytest.mark.parametrize("stream", [False, True])
async def test_b082_who_leaves_the_queue_is_gone_at_once(tmp_path: Path, stream: bool) -> None:
    """One place, taken for 5 s: the second leaves, the third comes. The queue is shorter at once, the backend never
    sees the second, and the third starts right after the first."""
    ended: list[float] = []

    async def script(connection: FakeConnection) -> None:
        while True:
            request = await connection.request()
            await asyncio.sleep(5 * WORK_S)
            await connection.answer(completion())
            ended.append(time.monotonic())
            assert request.json()["user"] != "two"

    async with Fake(script) as a, GatewayProcess(pool(a.url, concurrency=1), tmp_path) as gateway:
        first = asyncio.create_task(ask(gateway.port, chat(user="one")))
        await gateway.eventually(lambda: a.hits == 1, "the place is taken")
        async with RawClient(gateway.port) as second:
            await second.send(chat(user="two", stream=stream))

            async def queued(number: int) -> bool:
                return await gateway.metric("headrace_queued_requests") == number

            await gateway.eventually(lambda: queued(1), "it waits")
            second.close()
            left = time.monotonic()
            await gateway.eventually(lambda: queued(0), "it is gone", timeout_s=1.0)
            assert time.monotonic() - left < 1.0
        third = asyncio.create_task(ask(gateway.port, chat(user="three")))
        assert [response.status for response in await asyncio.gather(first, third)] == [200, 200]
        assert [request.json()["user"] for request in a.requests] == ["one", "three"]
        assert a.requests[1].at - ended[0] < 0.2 + SLACK_S
        await gateway.settled([a], outcomes={"ok": 2, "client_disconnect": 1})


async def test_b083_waiting_too_long_is_a_status_for_streams_too(tmp_path: Path) -> None:
    """The queue's limit ends a stream that has not begun with 503 and Retry-After, as it ends everything else."""
    limit_s = 3.0 if FULL else 0.6
    classes = {"interactive": {"max_wait": f"{limit_s}s"}}
    async with Fake(silent) as a:
        config = pool(a.url, concurrency=1, classes=classes, timeouts={"headers": "30s"})
        async with GatewayProcess(config, tmp_path) as gateway, RawClient(gateway.port) as holder:
            await holder.send(chat())
            await gateway.eventually(lambda: a.hits == 1, "the place is taken")
            for stream in (True, False):
                begun = time.monotonic()
                response = await ask(gateway.port, chat(stream=stream))
                assert limit_s - 0.05 <= time.monotonic() - begun < limit_s + 0.5 + SLACK_S
                assert (response.status, response.error()["code"]) == (503, "server_is_overloaded")
                assert response.header("content-type") == "application/json"
                assert response.header("x-headrace-reason") == "queue_timeout"
                assert 1 <= int(response.header("retry-after") or 0) <= 60
            holder.close()
            await gateway.settled([a], outcomes={"queue_timeout": 2, "client_disconnect": 1})


async def test_b085_many_clients_do_not_stop_the_work(tmp_path: Path) -> None:
    """500 clients (120 in the ordinary suite) with four requests each before 8 places of 10 ms: all are answered, the
    places are used, and there is no gap while somebody waits."""
    clients = len(times(500, 120))
    starts: list[float] = []

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            starts.append(time.monotonic())
            await asyncio.sleep(0.01)
            await connection.answer(completion())

    async def one() -> list[int]:
        async with RawClient(gateway.port) as client:
            return [(await client.ask(chat(), timeout_s=60)).status for _ in range(4)]

    classes = {"interactive": {"max_queued": 4000, "max_wait": "60s"}}
    async with Fake(script) as a:
        config = pool(a.url, concurrency=8, classes=classes)
        config["tenants"] = {}
        async with GatewayProcess(config, tmp_path) as gateway:
            statuses = [status for each in await asyncio.gather(*(one() for _ in range(clients))) for status in each]
            assert statuses.count(200) + statuses.count(503) == 4 * clients
            assert statuses.count(503) == 0
            gaps = [b - a for a, b in pairwise(starts)]
            assert max(gaps) < 0.2 + SLACK_S
            # 80 % of what the places can do, less what a loaded machine needs for 12 clients at a time
            assert starts[-1] - starts[0] < 4 * clients * 0.01 / 8 / 0.8 * 4 + SLACK_S
            await gateway.settled([a], outcomes={"ok": 4 * clients})


async def test_b086_each_class_has_a_queue_of_its_own(tmp_path: Path) -> None:
    """10 interactive and 50 batch may wait: of 200 batch those beyond are refused at once, five interactive are all
    taken, and the gauges never pass their limits."""
    classes = {"interactive": {"max_queued": 10, "max_wait": "60s"}, "batch": {"max_queued": 50, "max_wait": "60s"}}
    config = tenants(tmp_path, **{f"t{i}": {} for i in range(4)})
    most: dict[str, float] = {"interactive": 0, "batch": 0}

    async def watch() -> None:
        while True:
            for name in most:
                most[name] = max(most[name], await gateway.metric("headrace_queued_requests", **{"class": name}))
            await asyncio.sleep(0.02)

    async def one(number: int, class_: str) -> tuple[Response, float]:
        begun = time.monotonic()
        response = await ask(gateway.port, chat(auth(f"t{number % 4}"), f"x-headrace-class: {class_}"), timeout_s=60)
        return response, time.monotonic() - begun

    async with Fake(working(WORK_S / 2)) as a:  # noqa: SIM117
        async with GatewayProcess(pool(a.url, concurrency=4, classes=classes) | config, tmp_path) as gateway:
            watching = asyncio.create_task(watch())
            batch = [asyncio.create_task(one(number, "batch")) for number in range(200)]
            await asyncio.sleep(0.2)
            interactive = await asyncio.gather(*(one(number, "interactive") for number in range(5)))
            assert [response.status for response, _ in interactive] == [200] * 5
            found = await asyncio.gather(*batch)
            refused = [(response, took) for response, took in found if response.status == 503]
            assert 100 <= len(refused) <= 150
            assert sum(response.status == 200 for response, _ in found) == 200 - len(refused)
            for response, took in refused:
                assert response.header("x-headrace-reason") == "queue_full"
                assert int(response.header("retry-after") or 0) >= 1
                assert took < 1.0 + SLACK_S  # of 200 that come at once to a busy machine
            watching.cancel()
            assert most["interactive"] <= 10 and 0 < most["batch"] <= 50
            await gateway.settled([a], sent=205)


async def test_a_refusal_tells_how_many_wait_and_how_long(tmp_path: Path) -> None:
    """How many there are, how long they will take, and a Retry-After of the same measure: the backlog over the
    rate at which the queue was seen to drain."""
    classes = {"interactive": {"max_queued": 20, "max_wait": "60s"}}
    config = pool("", concurrency=1, classes=classes) | tenants(tmp_path, a={}, b={}, c={})
    async with Fake(working(0.5)) as fake:
        config["pools"]["p"]["backends"][0]["url"] = fake.url
        async with GatewayProcess(config, tmp_path) as gateway:
            waiting = [asyncio.create_task(ask(gateway.port, chat(auth("ab"[i % 2])), timeout_s=60)) for i in range(21)]
            await gateway.eventually(lambda: fake.hits == 6, "five left the queue", timeout_s=10)
            more = [asyncio.create_task(ask(gateway.port, chat(auth("c")), timeout_s=60)) for _ in range(5)]
            await asyncio.sleep(0.1)
            response = await ask(gateway.port, chat(auth("c")))
            assert response.status == 503
            message = response.error()["message"]
            told = [int(word) for word in message.replace(":", " ").split() if word.isdigit()]
            assert told[0] == 20 and "requests wait" in message, message
            assert 7 <= told[1] <= 15, message  # 20 requests of half a second
            assert 7 <= int(response.header("retry-after") or 0) <= 15
            assert 0 < int(response.header("retry-after-ms") or 0) <= 15_000
            answers = await asyncio.gather(*waiting, *more)
            assert [answer.status for answer in answers] == [200] * 26
            await gateway.settled([fake], outcomes={"ok": 26, "queue_full": 1})


async def test_a_deadline_is_kept_to(tmp_path: Path) -> None:
    """What the client will not wait for is refused when its time is up, and at once where that has been; an SDK's own
    read timeout counts too."""
    async with Fake(silent) as a:
        config = pool(a.url, concurrency=1, timeouts={"headers": "30s"})
        async with GatewayProcess(config, tmp_path) as gateway, RawClient(gateway.port) as holder:
            await holder.send(chat())
            await gateway.eventually(lambda: a.hits == 1, "the place is taken")
            for line in ("x-headrace-deadline: 300ms", "x-stainless-read-timeout: 0.3"):
                begun = time.monotonic()
                response = await ask(gateway.port, chat(line))
                assert 0.25 < time.monotonic() - begun < 0.3 + SLACK_S
                assert (response.status, response.header("x-headrace-reason")) == (503, "deadline_unreachable")
                assert int(response.header("retry-after") or 0) >= 1
            holder.close()
            await gateway.settled([a], outcomes={"deadline_unreachable": 2, "client_disconnect": 1})


async def test_the_class_is_told_on_every_answer(tmp_path: Path) -> None:
    """From the tier or the header, within what the tenant may use; on refusals as on answers."""
    config = tenants(tmp_path, both={}, low={"classes": ["batch"]})
    async with Fake(healthy) as a, GatewayProcess(pool(a.url) | config, tmp_path) as gateway:
        for tenant, lines, fields, class_ in (
            ("both", [], {}, "interactive"),
            ("both", [], {"service_tier": "flex"}, "batch"),
            ("both", [], {"service_tier": "priority"}, "interactive"),
            ("both", ["x-headrace-class: batch"], {}, "batch"),
            ("both", ["x-headrace-class: interactive"], {"service_tier": "flex"}, "interactive"),
            ("both", ["x-headrace-class: royal"], {}, "interactive"),
            ("low", ["x-headrace-class: interactive"], {}, "batch"),
        ):
            for stream in (False, True):
                response = await ask(gateway.port, chat(auth(tenant), *lines, stream=stream, **fields))
                assert (response.status, response.header("x-headrace-class")) == (200, class_)
        await gateway.settled([a], outcomes={"ok": 14})
