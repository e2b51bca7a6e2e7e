"""The overhead rig: its clients count right, its rows say what happened, and a whole run measures a real proxy."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from loadtests import machine, overhead, peers, scoreboard
from loadtests.loadgen import Caller, Client, LoadFailed, Reader, Tally, request
from loadtests.origin import answers, event, framed
from loadtests.overhead import Bench, Plan
from loadtests.scoreboard import Row

RELAY = Path(__file__).parent / "relay.py"
TINY = Plan(rounds=1, json_s=0.4, stream_s=0.6, streams=40, crowd=0, idle=20)


class Wire(asyncio.Transport):
    """A transport that only remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True


async def fed(client: Client, *pieces: bytes) -> Wire:
    """Connect the client and let it receive the pieces."""
    wire = Wire()
    client.connection_made(wire)
    for piece in pieces:
        client.data_received(piece)
    return wire


def test_a_caller_sends_again_when_the_answer_is_complete_and_not_before() -> None:
    """An answer in three pieces is one answer; the next request follows its last byte."""

    async def run() -> None:
        tally = Tally(time.perf_counter, recording=True)
        answer = answers()[1]
        caller = Caller(b"ask", tally)
        wire = await fed(caller, answer[:30], answer[30:-1])
        assert (len(tally.latencies), len(wire.written)) == (0, 1)
        caller.data_received(answer[-1:])
        assert (len(tally.latencies), len(wire.written)) == (1, 2)
        chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
        caller.data_received(chunked)
        caller.data_received(b"0\r\n\r\n")
        assert (len(tally.latencies), len(wire.written)) == (2, 3)

    asyncio.run(run())


def test_a_refusal_is_a_failure_and_not_a_fast_request() -> None:
    """A 503 is counted as such, its latency is not, and the loop stops."""

    async def run() -> None:
        tally = Tally(time.perf_counter, recording=True)
        caller = Caller(b"ask", tally)
        wire = await fed(caller, b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        assert tally.failures == {"HTTP/1.1 503 Se": 1}
        assert wire.aborted
        assert not tally.latencies
        with pytest.raises(LoadFailed):
            await caller.opened

    asyncio.run(run())


def test_gaps_are_between_events_and_none_inside_one_read() -> None:
    """The first token ends the TTFT; of three events in one read, one waited and two did not."""

    async def run() -> None:
        now = iter([0.0, 1.0, 1.5, 1.75])
        tally = Tally(lambda: next(now), recording=True)
        token = framed(event({"content": " x"}))
        role = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed(event({"role": "assistant"}))
        await fed(Reader(b"ask", tally), role, token, token * 3)
        assert tally.first_tokens == [1.5]
        assert tally.events == 3
        assert sorted(tally.all_gaps()) == [0.0, 0.0, 0.25]

    asyncio.run(run())


def test_medians_and_ratios_come_from_the_same_rows() -> None:
    """Three rounds give the middle one; a ratio is between the medians of two arms; no figure, no ratio."""
    nginx, ours, missing = Row("nginx"), Row("headrace"), Row("smg", skipped="not installed")
    for cost in (10.0, 30.0, 20.0):
        nginx.add("json", {"us_per_request": cost, "proxy_cpu": 0.95, "origin_cpu": 0.5, "client_cpu": 0.45})
        ours.add("json", {"us_per_request": 3 * cost})
    rows = [nginx, ours, missing]
    assert nginx.value("json", "us_per_request") == 20.0
    assert scoreboard.ratio(rows, ours, "nginx", "us_per_request") == 3.0
    assert scoreboard.ratio(rows, missing, "nginx", "us_per_request") is None
    assert nginx.bottleneck("json") == "proxy+load"
    assert ours.bottleneck("json") == "-"


def relay(site: peers.Site) -> peers.Launch:
    return peers.Launch([sys.executable, str(RELAY), str(site.port), str(site.backends[0])])


def failing(site: peers.Site) -> peers.Launch:
    """Good for the first answers, then it closes the connection in the middle of one."""
    return peers.Launch([sys.executable, str(RELAY), str(site.port), str(site.backends[0]), "100000"])


def broken(_: peers.Site) -> peers.Launch:
    return peers.Launch([sys.executable, "-c", "raise SystemExit('no such flag')"])


def absent(_: peers.Site) -> peers.Launch:
    raise peers.NotInstalled("not installed")


def test_a_run_measures_a_proxy_and_names_those_that_cannot_run(tmp_path: Path) -> None:
    """A relay costs CPU, carries what the origin sends, and keeps memory; the others are in the table with a reason."""
    arms = [peers.Arm(arm.__name__, arm) for arm in (relay, failing, broken, absent)]
    steps: list[str] = []
    bench = Bench(arms, TINY, machine.cores(), time.perf_counter, tmp_path)
    direct, relayed, failed, *others = uvloop.run(bench.run(steps.append))

    assert len(steps) == bench.steps()
    assert direct.value("json", "us_per_request") == 0.0
    assert (direct.value("json", "requests_per_s") or 0) > (relayed.value("json", "requests_per_s") or 0) > 100
    assert (relayed.value("json", "us_per_request") or 0) > 5.0
    assert (relayed.value("streams", "us_per_chunk") or 0) > 1.0
    # 40 streams at 50/s; a busy machine falls behind or catches up in the window, but not to nothing.
    assert (relayed.value("streams", "chunks_per_s") or 0) > 200
    assert (relayed.value("streams", "gap_p99_ms") or 0) > 10.0
    assert (relayed.value("streams", "ttft_p99_ms") or 0) >= (relayed.value("streams", "ttft_p50_ms") or 0) > 0
    assert (relayed.value("unread", "kb_per_unread_stream") or 0) > 50.0
    assert failed.failed
    assert "lost" in failed.failed.get("json", failed.failed.get("unread", ""))
    assert not failed.value("json", "us_per_request")
    assert [row.skipped for row in others] == [
        "it ended with status 1 before it was ready (no such flag)",
        "not installed",
    ]


def test_results_are_written_as_table_rows_and_plot(tmp_path: Path) -> None:
    """overhead.md names every arm, overhead.csv every figure, and the plot is a PNG."""
    nginx, missing = Row("nginx"), Row("smg", skipped="not installed")
    nginx.add("json", {"us_per_request": 14.0, "requests_per_s": 60000.0})
    nginx.add("streams", {"us_per_chunk": 10.0, "chunks_per_s": 25000.0})
    scoreboard.write([nginx, missing], tmp_path, peers.about(["nginx", "smg rr"]))
    text = (tmp_path / "overhead.md").read_text()
    assert "| nginx | 14.0 |" in text
    assert "smg==" in text
    assert "litellm" not in text
    assert "smg skipped: not installed" in text
    assert "nginx,json,us_per_request,14,1" in (tmp_path / "overhead.csv").read_text()
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")


def test_the_quick_form_prints_json_alone() -> None:
    """The command as the makefile calls it: rows on stdout, the progress elsewhere, well inside a minute."""
    command = [sys.executable, "-m", "loadtests.overhead", "--quick", "--json", "--arms", "nginx"]
    done = subprocess.run(command, cwd=peers.ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = json.loads(done.stdout)
    assert [row["arm"] for row in rows] == ["direct", "nginx"]
    assert rows[0]["json"]["requests_per_s"] > 0
    assert rows[1]["skipped"] is not None or rows[1]["json"]["us_per_request"] > 0


def test_a_run_that_is_terminated_leaves_nothing_running() -> None:
    """SIGTERM in the middle: the origin that it started ends with it."""
    command = [sys.executable, "-m", "loadtests.overhead", "--quick", "--json", "--arms", "nginx"]
    run = subprocess.Popen(command, cwd=peers.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 30
    while len(pids := machine.tree(run.pid)) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    run.terminate()
    assert run.wait(20) != 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_an_arm_is_chosen_by_its_name_or_that_of_its_family() -> None:
    """`smg` stands for both of its policies."""
    assert [arm.name for arm in overhead.chosen("nginx,smg")] == ["nginx", "smg rr", "smg cache"]
    assert len(request("key")) < 1024
