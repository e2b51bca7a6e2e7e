"""Metrics that tell the truth whatever clients and backends do. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections import Counter
from contextlib import AsyncExitStack
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.faults.fakes import DONE, Fake, FakeConnection, Request, Script, completion, event, healthy
from tests.faults.process import (
    BEARER,
    DIGEST,
    GAUGES,
    STREAM_S,
    TOKEN,
    GatewayProcess,
    pool,
    times,
)
from tests.faults.rawclient import RawClient, ask, chat, post
from tests.faults.reading import series, total, within

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
DEAD = "http://127.0.0.1:1"


async def test_b141_junk_of_clients_makes_no_series(tmp_path: Path) -> None:
    """Model names, paths, methods and keys that nobody knows: a handful of series, whatever their number."""
    number = len(times(20_000, 1500))
    async with Fake(healthy) as a:
        config = pool(a.url, models={"m": {"pool": "p"}, "*": {"pool": "p"}}, concurrency=64)
        async with GatewayProcess(config | {"tenants": {"t": {"keys": [{"sha256": DIGEST}]}}}, tmp_path) as gateway:
            rng = random.Random(141)
            for name in ("m", "junk"):
                await ask(gateway.port, chat(BEARER, model=name))
            await ask(gateway.port, b"PUT /junk HTTP/1.1\r\nHost: x\r\n\r\n")
            await ask(gateway.port, chat("Authorization: Bearer junk"))
            before, rss = series(await gateway.samples()), gateway.rss
            async with RawClient(gateway.port) as client:
                for _ in range(number):
                    junk = f"{rng.getrandbits(64):x}"
                    assert (await client.ask(chat(BEARER, model=junk))).status == 200
                    assert (await client.ask(post(b"{}", f"/v1/{junk}", BEARER))).status == 404
                    assert (await client.ask(b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n")).status == 405
                    assert (await client.ask(chat(f"Authorization: Bearer {junk}"))).status == 401
            begun = time.monotonic()
            after = series(await gateway.samples())
            assert time.monotonic() - begun < 0.4
            assert len(after - before) < 20
            assert {dict(labels)["model"] for name, labels in after if name == "headrace_requests_total"} == {
                *("m", "other", "unknown")
            }
            assert gateway.rss - rss < 20 * 2**20
            await gateway.settled([a], sent=2 * number + 3)


async def test_b142_users_and_keys_make_no_series(tmp_path: Path) -> None:
    """Series are as many as tenants and models, whoever asks with whatever key; tenants beyond the cap are one."""
    keys = {f"t{tenant}": [f"hr-{tenant}-{key}" for key in range(50)] for tenant in range(10)}
    tenants = {
        name: {"keys": [{"sha256": sha256(key.encode()).hexdigest()} for key in own]} for name, own in keys.items()
    }
    async with Fake(healthy) as a:
        config = pool(a.url, tenants=tenants) | {"security": {"secret": "env:SALT"}, "telemetry": {"tenants": 8}}
        async with GatewayProcess(config, tmp_path, {"SALT": "x" * 32}) as gateway:
            async with RawClient(gateway.port) as client:
                for number, key in enumerate(key for own in keys.values() for key in own):
                    for user in range(len(times(10, 1))):
                        body = chat(f"Authorization: Bearer {key}", user=f"u{number}-{user}")
                        assert (await client.ask(body)).status == 200
            found = series(await gateway.samples())
            labels = [dict(labels) for name, labels in found if name == "headrace_requests_total"]
            assert sorted(label["tenant"] for label in labels) == ["other", *(f"t{n}" for n in range(8))]
            assert not any("hr-" in str(labels) or "u1" in str(labels) for _, labels in found)


async def test_b142_backends_that_were_removed_are_in_no_series(tmp_path: Path) -> None:
    """They are added, one of two asked is theirs, they are removed: nothing on the page names them any more."""
    number = len(times(50, 8))
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Fake(healthy)) for _ in range(number + 1)]
        config = pool(fakes[0].url, routing="round_robin", server={"admin_token": "env:ADMIN_TOKEN"})
        async with GatewayProcess(config, tmp_path) as gateway:

            async def changed(action: str, fake: Fake) -> None:
                url = f"http://127.0.0.1:{gateway.admin_port}/admin/backends/{action}"
                headers = {"authorization": f"Bearer {TOKEN}"}
                assert (await gateway._http.post(url, json={"url": fake.url}, headers=headers)).status_code == 200

            for fake in fakes[1:]:
                await changed("add", fake)

            async def all_asked() -> bool:
                await ask(gateway.port, chat())
                return all(fake.hits for fake in fakes)

            await gateway.eventually(all_asked, "all were asked", timeout_s=30)
            before = (await gateway.get("/metrics")).text
            assert all(f'"{fake.url}"' in before for fake in fakes)
            for fake in fakes[1:]:
                await changed("remove", fake)

            async def gone() -> bool:
                page = (await gateway.get("/metrics")).text
                return not any(f'"{fake.url}"' in page for fake in fakes[1:])

            await gateway.eventually(gone, "they are in no series", timeout_s=10)
            assert f'"{fakes[0].url}"' in (await gateway.get("/metrics")).text


async def test_a_backend_that_was_never_taken_out_says_so(tmp_path: Path) -> None:
    """With a zero for each reason: what begins with one would be no increase to Prometheus."""
    async with Fake(healthy) as a, GatewayProcess(pool(a.url, health={"interval": "100ms"}), tmp_path) as gateway:
        told = {
            dict(labels)["reason"]: value
            for (name, labels), value in (await gateway.samples()).items()
            if name == "headrace_ejections_total"
        }
        assert told == {"down": 0.0, "ejected": 0.0}
        await gateway.settled([a], sent=0)


async def test_b143_names_of_any_characters_leave_the_page_readable(tmp_path: Path) -> None:
    """Quotes, line ends and control characters in configured names, and in those of clients."""
    tenant, model = 'a"b\\c', "m\nx"
    async with Fake(healthy) as a:
        config = pool(a.url, models={model: {"pool": "p"}, "*": {"pool": "p"}})
        config["tenants"] = {tenant: {"keys": [{"sha256": DIGEST}]}}
        async with GatewayProcess(config, tmp_path) as gateway:
            for name in (model, "odd\u2028\x1b", 'x"} 1\n'):
                assert (await ask(gateway.port, chat(BEARER, model=name, stream=True))).status == 200
            text = (await gateway.get("/metrics")).text
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            url = f"http://127.0.0.1:{gateway.admin_port}/metrics"
            openmetrics = (await gateway._http.get(url, headers=accept)).text
            families = {family.name for family in read_text(text)}
            assert families == {family.name for family in read_openmetrics(openmetrics)} != set()
            labels = [s.labels for f in read_text(text) for s in f.samples if s.name == "headrace_requests_total"]
            assert {(each["tenant"], each["model"]) for each in labels} == {(tenant, model), (tenant, "other")}
            if promtool := shutil.which("promtool", path=f"{ROOT}/.cache/prometheus/usr/bin:/usr/bin"):
                process = await asyncio.create_subprocess_exec(
                    promtool, "check", "metrics", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
                )
                _, told = await process.communicate(text.encode())
                assert process.returncode == 0, told.decode()


def moody(seed: int) -> Script:
    """A backend that answers, is busy, breaks off, or says nothing for a while; by lot."""
    rng = random.Random(seed)

    async def script(connection: FakeConnection) -> None:
        while True:
            request = await connection.request()
            mood = rng.random()
            if mood < 0.1:
                await connection.answer(b'{"error":{"message":"busy"}}', "503 Service Unavailable")
            elif mood < 0.2:
                await connection.stream_head()
                await connection.chunk(event("t"))
                connection.reset()
                return
            else:
                await asyncio.sleep(rng.random() * 0.02)
                await reply(connection, request)

    return script


async def reply(connection: FakeConnection, request: Request) -> None:
    """A good answer."""
    if not request.json().get("stream"):
        await connection.answer(completion())
        return
    await connection.stream_head()
    for each in (event("a"), event("b"), event(finish="stop"), DONE):
        await connection.chunk(each)
    await connection.last_chunk()


async def test_b144_gauges_and_outcomes_add_up_over_a_mixed_run(tmp_path: Path) -> None:
    """Good, retried, left, broken, refused, unknown: no gauge is ever negative, and each request is one outcome."""
    number = len(times(1000, 400))
    async with Fake(moody(1)) as a, Fake(moody(2)) as b:
        config = pool(a.url, b.url, concurrency=2, classes={"interactive": {"max_queued": 8, "max_wait": "1s"}})
        config["tenants"] = {"t": {"keys": [{"sha256": DIGEST}]}}
        async with GatewayProcess(config, tmp_path) as gateway:
            rng = random.Random(144)
            done, sent = asyncio.Event(), 0

            async def watch() -> int:
                for looked in count(1):
                    samples = await gateway.samples()
                    assert all(value >= 0 for (name, _), value in samples.items() if name in GAUGES)
                    if done.is_set():
                        return looked
                    await asyncio.sleep(0.02)
                return 0

            async def client() -> None:
                nonlocal sent
                while sent < number:
                    sent += 1
                    kind = rng.choice(["good", "good", "stream", "stream", "leave", "bad key", "bad model", "bad body"])
                    request = chat(
                        BEARER if kind != "bad key" else "Authorization: Bearer no",
                        model="nobody" if kind == "bad model" else "m",
                        stream=kind in ("stream", "leave"),
                    )
                    if kind == "bad body":
                        request = post(b'{"model":', "/v1/chat/completions", BEARER)
                    async with RawClient(gateway.port) as raw:
                        await raw.send(request)
                        if kind == "leave":
                            await asyncio.sleep(rng.random() * 0.02)
                            raw.reset()
                        else:
                            await raw.response(30)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(client() for _ in range(24)))
            await gateway.idle([a, b])
            done.set()
            assert await watching >= 3
            outcomes, samples = await gateway.outcomes(), await gateway.since()
            assert {"ok", "upstream_truncated", "client_disconnect", "invalid_api_key", "queue_full"} <= set(outcomes)
            assert sum(outcomes.values()) == number
            assert total(samples, "headrace_retries_total") > 0
            judged = total(samples, "headrace_goodput_total") + total(samples, "headrace_slo_misses_total")
            ours = {"invalid_api_key", "model_not_found", "invalid_body", "client_disconnect"}
            assert judged == sum(n for outcome, n in outcomes.items() if outcome not in ours)
            await gateway.settled([a, b], sent=number)
            assert Counter(line["outcome"] for line in gateway.lines[:number]) == outcomes


async def test_b145_a_stream_is_in_flight_until_it_ends(tmp_path: Path) -> None:
    """Ten open streams are ten in flight, there and everywhere; the next request goes where fewer are."""
    gate = asyncio.Event()

    async def held(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("t"))
        await gate.wait()
        for each in (event(finish="stop"), DONE):
            await connection.chunk(each)
        await connection.last_chunk()

    async with Fake(held) as a, Fake(held) as b:
        config = pool(a.url, b.url, routing="least_tokens")
        async with GatewayProcess(config, tmp_path) as gateway:
            streams = []
            for number in range(1, 11):
                streams.append(asyncio.create_task(ask(gateway.port, chat(stream=True))))
                await gateway.eventually(lambda: a.hits + b.hits >= number, "it is at a backend")  # noqa: B023
            begun = time.monotonic()

            async def open_streams() -> bool:
                return await gateway.metric("headrace_open_streams") == 10

            await gateway.eventually(open_streams, "all streams are open")
            assert await gateway.metric("headrace_in_flight_requests") == 10
            for fake in (a, b):
                assert await gateway.metric("headrace_in_flight_requests", backend=fake.url) == 5 == fake.hits
            await asyncio.sleep(STREAM_S)
            gate.set()
            await asyncio.gather(*streams)
            held_s = time.monotonic() - begun
            samples = await gateway.since()
            assert within(samples, "headrace_request_seconds", 0.75 if STREAM_S < 5 else 3.0, 600.0) == 10
            assert total(samples, "headrace_request_seconds_sum") <= 10 * (held_s + 1.0)
            await gateway.settled([a, b], sent=10)


async def test_b151_what_fails_after_the_head_is_no_success(tmp_path: Path) -> None:
    """Cut off, gone silent, an error in the stream, a client that left, and good ones: as many of each, by reason."""
    number = len(times(10, 4))

    async def script(connection: FakeConnection) -> None:
        user = (await connection.request()).json()["user"]
        await connection.stream_head()
        await connection.chunk(event("t"))
        if user == "cut":
            connection.fin()
            return
        if user in ("silent", "left"):
            await connection.wait_closed()
            return
        if user == "error":
            await connection.chunk(b'data: {"error": {"message": "died", "code": 500}}\n\n')
        else:
            await connection.chunk(event(finish="stop"))
        await connection.chunk(DONE)
        await connection.last_chunk()

    async with Fake(script) as a:
        config = pool(a.url, concurrency=64, timeouts={"idle": "1s"})
        async with GatewayProcess(config, tmp_path) as gateway:

            async def client(user: str) -> None:
                async with RawClient(gateway.port) as raw:
                    await raw.send(chat(stream=True, user=user))
                    await raw.response(30, until=b'"t"' if user == "left" else None)

            users = ("cut", "silent", "error", "left", "good")
            await asyncio.gather(*(client(user) for user in users for _ in range(number)))
            expected = {
                "upstream_truncated": number,
                "upstream_timeout": number,
                "upstream_error": number,
                "client_disconnect": number,
                "ok": number,
            }
            await gateway.idle([a])
            samples = await gateway.since()
            assert total(samples, "headrace_goodput_total") == number
            assert await gateway.metric("headrace_slo_misses_total", cause="upstream") == 3 * number
            assert await gateway.metric("headrace_cancelled_total", phase="answer") == number
            await gateway.settled([a], sent=5 * number, outcomes=expected)
            assert Counter(line["outcome"] for line in gateway.lines[: 5 * number]) == expected


async def test_objectives_count_every_request_once(tmp_path: Path) -> None:
    """Good, late and slow streams of a model with objectives: each is in goodput or in one cause of misses."""

    async def script(connection: FakeConnection) -> None:
        while True:
            user = (await connection.request()).json()["user"]
            await asyncio.sleep(0.5 if user == "late" else 0.0)
            await connection.stream_head()
            for _ in range(5):
                await connection.chunk(event("t"))
                await asyncio.sleep(0.15 if user == "slow" else 0.0)
            for each in (event(finish="stop"), DONE):
                await connection.chunk(each)
            await connection.last_chunk()

    async with Fake(script) as a:
        goal = {"m": {"pool": "p", "slo": {"ttft": "300ms", "itl": "80ms"}}}
        async with GatewayProcess(pool(a.url, models=goal), tmp_path) as gateway:
            for user in ("good", "good", "late", "slow"):
                await ask(gateway.port, chat(stream=True, user=user))
            assert await gateway.metric("headrace_goodput_total", model="m", tenant="anonymous") == 2
            for cause in ("prefill", "decode"):
                assert await gateway.metric("headrace_slo_misses_total", cause=cause) == 1
            for objective, missed in (("ttft", 1), ("itl", 1), ("availability", 0)):
                found = {
                    result: await gateway.metric("headrace_objectives_total", objective=objective, result=result)
                    for result in ("met", "missed")
                }
                assert found == {"met": 4 - missed, "missed": missed}
            await gateway.settled([a], sent=4)
            assert [line["cause"] for line in gateway.lines] == ["", "", "prefill", "decode"]


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\nContent-Disposition: form-data; '
    b'name="file"; filename="a.wav"\r\n\r\n' + b"x" * 400 + b"\r\n--x--\r\n"
)
ONESHOT: dict[str, tuple[bytes, str]] = {
    path: (json.dumps({"model": "m", "input": "x" * 500}).encode(), "application/json")
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/audio/speech", "/v1/images/generations", "/tokenize")
} | {"/v1/audio/transcriptions": (FORM, "multipart/form-data; boundary=x")}


@pytest.mark.parametrize("path", list(ONESHOT))
async def test_work_without_tokens_is_told_apart(gateway: GatewayProcess, a: Fake, path: str) -> None:
    """Embeddings, rerank, audio, images have a duration and sizes of their own, by endpoint, and no tokens."""
    body, kind = ONESHOT[path]

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.06)
        await connection.answer(b'{"data":[],"usage":{"prompt_tokens":9,"total_tokens":9}}' + b" " * 5000)

    a.script = script
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    assert (await ask(gateway.port, head.encode() + body)).status == 200
    samples = await gateway.since()
    assert within(samples, "headrace_oneshot_request_bytes", 256.0, 1024.0) == 1
    assert within(samples, "headrace_oneshot_response_bytes", 4096.0, 16384.0) == 1
    assert within(samples, "headrace_oneshot_seconds", 0.05, 3.0) == 1
    counted = {dict(labels)["endpoint"] for (name, labels), n in samples.items() if "oneshot" in name and n}
    assert counted == {path}
    for name in ("headrace_tokens_total", "headrace_request_seconds_count", "headrace_ttft_seconds_count"):
        assert total(samples, name) == 0
    await gateway.settled([a], sent=1)
