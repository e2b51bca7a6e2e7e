"""Retries. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, Script, completion, event, healthy, silent
from tests.faults.process import GatewayProcess, pool, times
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio

SLACK_S = 1.0
MODES: list[dict[str, Any]] = [{"stream": True}, {"stream": False}]


def refusing(status: str, **headers: str) -> Script:
    """Answers everything with one status."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.answer(b'{"error":{"message":"no"}}', status, **headers)

    return script


async def test_b039_nothing_is_retried_after_the_first_bytes(tmp_path: Path) -> None:
    """Five tokens, then a reset: the client has them and an error frame, the other backend nothing."""

    async def breaking(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        for number in range(1, 6):
            await connection.chunk(event(f"a{number}"))
        await asyncio.sleep(0.1)
        connection.reset()

    async with (
        Fake(breaking) as a,
        Fake(healthy) as b,
        GatewayProcess(pool(a.url, b.url, routing="round_robin"), tmp_path) as gateway,
    ):
        for _ in range(4):
            before = a.hits, b.hits
            response = await ask(gateway.port, chat(stream=True))
            if a.hits > before[0]:
                assert b.hits == before[1]
                assert all(b"a%d" % number in response.body for number in range(1, 6))
                assert b'data: {"error"' in response.body
                assert DONE not in response.body
                assert b"t0" not in response.body
        assert a.hits == b.hits == 2


@pytest.mark.parametrize("mode", MODES)
async def test_time_at_a_backend_that_failed_is_no_wait_for_a_place(tmp_path: Path, mode: dict[str, Any]) -> None:
    """It breaks off before its first byte, after longer than a request may wait in the queue: the other one serves."""

    async def breaking(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.6)
        connection.reset()

    config = pool("", "", routing="round_robin", timeouts={"headers": "20s"})
    config["classes"] = {"interactive": {"max_wait": "300ms"}}
    async with Fake(breaking) as a, Fake(healthy) as b:
        for told, fake in zip(config["pools"]["p"]["backends"], (a, b), strict=True):
            told["url"] = fake.url
        async with GatewayProcess(config, tmp_path) as gateway:
            for _ in range(2):
                assert (await ask(gateway.port, chat(**mode))).status == 200
    assert a.hits


async def test_b040_retries_do_not_multiply(tmp_path: Path) -> None:
    """Three backends that always refuse: each request is tried once on each, and the metrics agree."""
    count = 4  # of each kind: as many as the floor of the budget allows
    async with (
        Fake(refusing("503 Service Unavailable")) as a,
        Fake(refusing("503 Service Unavailable")) as b,
        Fake(refusing("503 Service Unavailable")) as c,
    ):
        fakes = (a, b, c)
        retries = {"attempts": 2, "budget": "100%"}
        async with GatewayProcess(pool(*(fake.url for fake in fakes), retries=retries), tmp_path) as gateway:
            for mode in MODES:
                for _ in range(count):
                    response = await ask(gateway.port, chat(**mode))
                    assert response.status == 503
                    assert response.header("x-should-retry") == "false"
            assert [fake.hits for fake in fakes] == [2 * count] * 3
            assert {line["attempts"] for line in gateway.lines} == {3}
            assert await gateway.metric("headrace_upstream_failures_total") == 6 * count


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_b041_what_the_client_did_wrong_is_not_retried(status: int, tmp_path: Path) -> None:
    """It gets the backend's answer; nobody else is asked."""
    async with (
        Fake(refusing(f"{status} No")) as a,
        Fake(refusing(f"{status} No")) as b,
        GatewayProcess(pool(a.url, b.url), tmp_path) as gateway,
    ):
        response = await ask(gateway.port, chat())
        assert (response.status, a.hits + b.hits) == (status, 1)


async def test_b042_nobody_tries_for_a_client_that_left(tmp_path: Path) -> None:
    """Both backends are silent; the client leaves: no attempt begins afterwards, and the open one is closed."""
    async with Fake(silent) as a, Fake(silent) as b, GatewayProcess(pool(a.url, b.url), tmp_path) as gateway:
        async with RawClient(gateway.port) as client:
            await client.send(chat())
            await asyncio.sleep(1.0)
            client.reset()
        await gateway.eventually(lambda: len(a.closed) + len(b.closed) == 1, "it is closed", timeout_s=1.0 + SLACK_S)
        await asyncio.sleep(len(times(59, 3)))
        assert a.hits + b.hits == 1
        await gateway.settled([a, b], outcomes={"client_disconnect": 1})


@pytest.mark.parametrize("mode", MODES, ids=["stream", "whole"])
async def test_b043_a_silent_backend_has_a_clock(mode: dict[str, Any], tmp_path: Path) -> None:
    """504 at the limit, with and without another backend: it may have begun, so nobody else is asked."""
    async with Fake(silent) as a, Fake(silent) as b, GatewayProcess(pool(a.url, b.url), tmp_path) as gateway:
        begun = time.monotonic()
        response = await ask(gateway.port, chat(**mode))
        assert (response.status, response.error()["code"]) == (504, "upstream_timeout")
        assert 1.9 <= time.monotonic() - begun <= 2.5 + SLACK_S
        assert a.hits + b.hits == 1


async def test_b045_streams_and_whole_answers_are_retried_alike(tmp_path: Path) -> None:
    """A backend refuses connections: all are served by the other, in the same number of attempts."""
    async with Fake(healthy) as a, Fake(healthy) as b:
        await a.stop()
        config = pool(a.url, b.url, routing="round_robin", retries={"budget": "100%"})
        async with GatewayProcess(config, tmp_path) as gateway:
            counts: dict[bool, list[int]] = {}
            assert (await ask(gateway.port, chat())).status == 200  # the first of two that had nothing yet is drawn
            for mode in MODES:
                answers = [await ask(gateway.port, chat(**mode)) for _ in range(20)]
                assert {answer.status for answer in answers} == {200}
            await gateway.settled(sent=41)
            for line in gateway.lines[1:41]:
                counts.setdefault(line["stream"], []).append(line["attempts"])
            assert sorted(counts[True]) == sorted(counts[False])
            assert max(counts[True]) == 2


async def test_b045_once_it_is_ejected_one_attempt_is_enough(tmp_path: Path) -> None:
    """The same with an eye on the backend: two connect failures, and it is left alone."""
    async with Fake(healthy) as a, Fake(healthy) as b:
        await a.stop()
        config = pool(a.url, b.url, routing="round_robin", health={"interval": "0s"})
        async with GatewayProcess(config, tmp_path) as gateway:
            answers = [await ask(gateway.port, chat()) for _ in range(20)]
            assert {answer.status for answer in answers} == {200}
            await gateway.eventually(lambda: len(gateway.lines) == 20, "all are logged")
            assert sum(line["attempts"] for line in gateway.lines) <= 22 + 1


async def test_b046_a_backend_that_is_stopping_costs_nobody_anything(tmp_path: Path) -> None:
    """One in five of its requests gets 503 and a closed connection: no client sees it, nothing runs twice."""
    rng, ran = Random(46), 0

    def serving(share: float) -> Script:
        async def script(connection: FakeConnection) -> None:
            nonlocal ran
            while True:
                request = await connection.request()
                if rng.random() < share:
                    await connection.answer(b"{}", "503 Service Unavailable", connection="close")
                    return
                ran += 1
                if not request.json().get("stream"):
                    await connection.answer(completion())
                    continue
                await connection.stream_head()
                await connection.chunk(event("t") + event(finish="stop") + DONE)
                await connection.last_chunk()

        return script

    count = len(times(250, 100))
    async with Fake(serving(0.2)) as a, Fake(serving(0.0)) as b:
        config = pool(a.url, b.url, routing="round_robin", health={"interval": "0s"})
        async with GatewayProcess(config, tmp_path) as gateway:
            answers: list[Response] = []
            for _ in range(count):
                answers += await asyncio.gather(*(ask(gateway.port, chat(**mode)) for mode in MODES))
            assert {answer.status for answer in answers} == {200}
            assert ran == 2 * count


async def test_b047_timeouts_cause_no_storm(tmp_path: Path) -> None:
    """Both backends take longer than anybody waits: attempts stay within the budget, and nothing is left over."""
    seconds = len(times(20, 5))
    async with Fake(silent) as a, Fake(silent) as b:
        config = pool(a.url, b.url, concurrency=64, timeouts={"headers": "1s"})
        async with GatewayProcess(config, tmp_path) as gateway:
            asked = []
            for _ in range(20 * seconds):
                asked.append(asyncio.create_task(ask(gateway.port, chat())))
                await asyncio.sleep(0.05)
            answers = await asyncio.gather(*asked)
            assert {answer.status for answer in answers} <= {504, 503}
            assert a.hits + b.hits <= 1.2 * len(answers)
            await gateway.settled([a, b], sent=len(answers))


async def test_an_upstreams_retry_after_is_honoured(tmp_path: Path) -> None:
    """A backend that asks for two seconds gets them, while another serves."""
    async with Fake(refusing("429 Too Many Requests", retry_after="2")) as a, Fake(healthy) as b:
        config = pool(a.url, b.url, routing="round_robin", health={"interval": "0s"})
        async with GatewayProcess(config, tmp_path) as gateway:
            begun = time.monotonic()
            answers = [await ask(gateway.port, chat()) for _ in range(30)]
            assert {answer.status for answer in answers} == {200}
            assert a.hits == 1 or time.monotonic() - begun > 2.0


async def test_nothing_is_tried_again_when_its_time_is_over(tmp_path: Path) -> None:
    """Past the deadline of the request the failure is told, and not that the deadline cannot be met."""

    async def late(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.4)
        await connection.answer(b"{}", "503 Service Unavailable")

    async with Fake(late) as a, Fake(late) as b, GatewayProcess(pool(a.url, b.url), tmp_path) as gateway:
        answer = await ask(gateway.port, chat("X-Headrace-Deadline: 200ms"))
        assert (answer.status, answer.header("x-headrace-reason")) == (503, None)
        assert a.hits + b.hits == 1
        assert (await ask(gateway.port, chat("X-Headrace-Deadline: 5s"))).status == 503
        assert a.hits + b.hits == 3
        await gateway.settled(outcomes={"upstream_error": 2})


async def test_the_sdks_own_retries_use_the_budget_up(tmp_path: Path) -> None:
    """Each counts as one of ours; when there is none left a failure is told at once."""
    async with (
        Fake(refusing("503 Service Unavailable")) as a,
        Fake(refusing("503 Service Unavailable")) as b,
        GatewayProcess(pool(a.url, b.url), tmp_path) as gateway,
    ):
        await ask(gateway.port, chat())
        assert a.hits + b.hits == 2
        for _ in range(12):
            await ask(gateway.port, chat("x-stainless-retry-count: 1"))
        before = a.hits + b.hits
        await ask(gateway.port, chat("x-stainless-retry-count: 1"))
        assert a.hits + b.hits == before + 1
