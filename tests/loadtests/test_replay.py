"""The replay over HTTP: what is sent is what the trace says, what comes back is judged right, and a short one runs."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtests import machine, peers, replay, replayed
from loadtests.replay import Listener, Plan, calls, prompt
from loadtests.replayed import Outcome, Row
from loadtests.traces import Request

PLAN = Plan("conversation", 1, 600.0, 20.0, 0.5, 2.0, 4.0, 2)
COMMAND = [sys.executable, "-m", "loadtests.replay", "--quick", "--json"]


def test_prompts_are_alike_as_far_as_the_trace_says() -> None:
    """Equal digests are equal text, other digests other text, and pieces without a digest nobody else's."""
    one, two = Request(0.0, 1500, 9, (b"a", b"b", b"c")), Request(0.0, 1030, 9, (b"a", b"b", b"x"))
    first, second = prompt(one, 1), prompt(two, 2)
    assert (len(first), len(second)) == (1500 * 4, 1030 * 4)
    assert first[: 1024 * 4] == second[: 1024 * 4]
    assert first[1024 * 4 :][:24] != second[1024 * 4 :]
    bare = Request(0.0, 600, 9)
    assert prompt(bare, 1)[:2048] != prompt(bare, 2)[:2048]
    assert prompt(bare, 1) == prompt(bare, 1)


def test_a_slice_comes_as_fast_as_the_load_says() -> None:
    """Twice the load is twice the requests in the same time, and a speed-up shrinks times and limits alike."""
    once, twice = calls(PLAN), calls(Plan("conversation", 1, 600.0, 20.0, 0.5, 4.0, 4.0, 2))
    assert 1.6 * len(once) < len(twice) < 2.4 * len(once)
    assert all(0.0 <= call.at_s < 20.0 / 4.0 for call in once)
    slow = calls(Plan("conversation", 1, 600.0, 20.0, 0.5, 2.0, 1.0, 2))
    assert [call.limit_s for call in slow] == pytest.approx([4.0 * call.limit_s for call in once])
    body = json.loads(once[0].sent.partition(b"\r\n\r\n")[2])
    assert body["min_tokens"] == once[0].output_tokens
    assert "max_tokens" not in body


def heard(*reads: bytes) -> Listener:
    """A listener to which the reads came, a second apart."""

    async def run() -> Listener:
        now = iter(range(1, 99))
        listener = Listener(b"", lambda: float(next(now)))
        listener.transport = asyncio.Transport()
        for read in reads:
            listener.data_received(read)
        listener.connection_lost(None)
        await listener.over
        return listener

    return asyncio.run(run())


OK = b"HTTP/1.1 200 OK\r\n\r\n"


def test_an_answer_is_whole_only_with_its_end() -> None:
    """The first token is the second event; a stream that breaks has a first token and no last; a refusal has none."""
    whole = heard(OK + b"data: role\n\n", b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert (whole.status, whole.first_s, whole.last_s) == (b"200", 1.0, 2.0)
    broken = heard(OK + b"data: role\n\ndata: a\n\n", b"data: {error}\n\n\r\n0\r\n\r\n")
    assert (broken.first_s, broken.last_s) == (1.0, None)
    refused = heard(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}\n\n\n\n")
    assert (refused.status, refused.last_s) == (b"503", None)


def test_goodput_counts_what_met_both_objectives_among_all() -> None:
    """Late, slow, refused and unanswered requests all count as sent; latencies are in the engines' seconds."""
    outcomes = [
        Outcome(1.0, "200", 0.5, 0.01),
        Outcome(1.0, "200", 1.5, 0.01),
        Outcome(1.0, "200", 0.5, 0.03),
        Outcome(1.0, "200", 0.5, None),
        Outcome(1.0, "503"),
    ]
    found = replayed.figures(outcomes, speed=5.0, slo_tpot_s=0.1)
    assert found["goodput"] == pytest.approx(0.2)
    assert found["refused"] == pytest.approx(0.2)
    assert found["unanswered"] == pytest.approx(0.2)
    assert found["ttft_p50"] == pytest.approx(2.5)


def test_the_ratio_is_to_the_best_rival_at_the_highest_load(tmp_path: Path) -> None:
    """Table, rows and plot are written, and what is missing is named."""
    figures = dict.fromkeys(replayed.COLUMNS, 0.0)
    rows = [
        Row("nginx", 1.0, {**figures, "goodput": 0.9}),
        Row("nginx", 2.0, {**figures, "goodput": 0.2}),
        Row("smg cache", 2.0, {**figures, "goodput": 0.3}),
        Row("headrace", 1.0, {**figures, "goodput": 0.99}),
        Row("headrace", 2.0, {**figures, "goodput": 0.9}),
        Row("sglang-router cache", 2.0, skipped="not installed"),
    ]
    assert replayed.ratio(rows) == pytest.approx(3.0)
    assert replayed.ratio(rows[:3]) is None
    replayed.write(rows, tmp_path, "about")
    text = (tmp_path / "replay.md").read_text()
    assert "| headrace | 2 | 0.900 |" in text
    assert "3.0 times" in text
    assert "sglang-router cache skipped: not installed" in text
    assert "headrace,2,goodput,0.9" in (tmp_path / "replay.csv").read_text()
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_a_short_replay_runs_and_headrace_serves_more_in_time() -> None:
    """Real processes at twice the capacity: round robin answers late what the gateway orders or refuses."""
    done = subprocess.run(COMMAND, cwd=peers.ROOT, capture_output=True, text=True, timeout=120, check=True)
    rows = {row["arm"]: row for row in json.loads(done.stdout)}
    ours = rows["headrace"]
    assert ours["skipped"] is None
    assert ours["requests"] > 20
    assert ours["goodput"] > 0.3
    if rows["nginx"]["skipped"] is None:
        assert ours["goodput"] > rows["nginx"]["goodput"]


def test_a_replay_that_is_terminated_leaves_nothing_running() -> None:
    """SIGTERM in the middle: backends and proxies end with it."""
    run = subprocess.Popen(COMMAND, cwd=peers.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while len(pids := machine.tree(run.pid)) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) != 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_an_unknown_arm_is_named() -> None:
    """A typo is not an empty table."""
    with pytest.raises(SystemExit):
        replay.main(["--quick", "--arms", "nginx,headrce"])
