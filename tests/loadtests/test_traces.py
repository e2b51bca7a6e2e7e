"""The public traces as they are in the repository, and what is said of files that are not as they should be."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from loadtests import traces
from loadtests.tracefile import TraceError, objects, rows


@pytest.mark.parametrize(
    ("name", "requests", "mean_prompt", "mean_output"),
    [
        ("conversation", 12_031, 12_035, 343),
        ("synthetic", 3_993, 15_325, 149),
        ("azure-chat", 19_366, 1_155, 211),
        ("azure-code", 8_819, 2_048, 28),
        ("arena", 1_500, 136, 256),
    ],
)
def test_complete_traces_have_their_published_figures(
    name: str, requests: int, mean_prompt: int, mean_output: int
) -> None:
    """Number of requests and mean lengths are those of the sources."""
    found = traces.load(name, seed=1)
    assert len(found) == requests
    assert round(sum(r.prompt_tokens for r in found) / requests) == mean_prompt
    assert round(sum(r.output_tokens for r in found) / requests) == mean_output
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))


def test_a_seed_draws_only_what_the_file_leaves_open() -> None:
    """Equal seeds give equal requests; other seeds move conversations inside their 3 s bins, and nothing else."""
    one, same, other = (traces.load("conversation", seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert sorted(r.digests for r in one) == sorted(r.digests for r in other)
    counts = Counter(r.digests for r in one)
    bins = {r.digests: r.at_s // 3 for r in one if counts[r.digests] == 1}
    assert len(bins) > 10_000
    assert all(abs(bins[r.digests] - r.at_s // 3) <= 1 for r in other if r.digests in bins)


def test_conversations_share_prefixes() -> None:
    """Block 0 is common to all, and 37 % of the tokens were seen before (the cache of infinite size)."""
    found = traces.load("conversation", seed=1)
    assert len({r.digests[0] for r in found}) == 1
    seen: set[bytes] = set()
    hits = 0
    for request in found:
        known = next((i for i, d in enumerate(request.digests) if d not in seen), len(request.digests))
        hits += min(512 * known, request.prompt_tokens)
        seen.update(request.digests)
    assert 0.35 < hits / sum(r.prompt_tokens for r in found) < 0.39


@pytest.mark.parametrize("name", ["servegen-deepseek-r1", "servegen-m-large", "servegen-m-small"])
def test_servegen_keeps_rate_and_skew(name: str) -> None:
    """An hour at ten requests per second, of which the busiest ten clients send at least half."""
    found = traces.load(name, seed=1)
    assert abs(len(found) - 36_000) < 100
    assert 0 <= found[0].at_s < found[-1].at_s <= 3600
    per_client = sorted((sum(r.client == c for r in found) for c in {r.client for r in found}), reverse=True)
    assert sum(per_client[:10]) > len(found) / 2


def test_sessions_grow_and_share_their_tools() -> None:
    """199 sessions fit 120k tokens; a turn's prompt begins like the one before, and sessions begin alike."""
    found = traces.sessions(seed=1)
    assert len(found) == 199
    assert all(turn.think_s <= 300 for session in found for turn in session)
    pairs = [(a.request.digests, b.request.digests) for session in found for a, b in pairwise(session)]
    grown = [later[: len(earlier)] == earlier for earlier, later in pairs]
    assert sum(grown) / len(grown) > 0.7
    firsts = [session[0].request.digests[0] for session in found]
    assert len(set(firsts)) < len(firsts) / 2
    assert traces.sessions(seed=1) == found


def test_an_unknown_trace_is_named(tmp_path: Path) -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match=r"unknown trace 'nope'; there are arena, .*agentic"):
        traces.load("nope", seed=1)


def test_broken_files_are_named_with_their_line(tmp_path: Path) -> None:
    """Corrupt gzip, no JSON, a missing field or column, a short row: file, line and reason."""
    whole = gzip.compress(b'{"a": 1}\n' * 2000 + bytes(range(32, 120)) * 50)
    cases = {
        "cut.gz": (whole[: len(whole) // 2], r"cut.gz:\d+: broken: .*ended"),
        "plain.gz": (b"not gzip at all", r"plain.gz:1: broken: Not a gzipped file"),
        "json.gz": (gzip.compress(b'{"a": 1}\n{"a": \n'), r"json.gz:2: Expecting value"),
        "field.gz": (gzip.compress(b'{"a": 1}\n{"b": 2}\n'), r"field.gz:2: no field 'a'"),
        "type.gz": (gzip.compress(b'{"a": 1}\n[1]\n'), r"type.gz:2: list indices"),
        "text.gz": (gzip.compress(b'{"a": 1}\n\xff\xfe\n'), r"text.gz:\d: broken: .*utf-8"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=message):
            list(objects(tmp_path / name, lambda row: row["a"]))
    with pytest.raises(TraceError, match=r"gone.gz:1: no such file"):
        list(objects(tmp_path / "gone.gz", lambda row: row["a"]))
    table = tmp_path / "table.gz"
    table.write_bytes(gzip.compress(b"time,tokens\n1,2\n3\n"))
    with pytest.raises(TraceError, match=r"table.gz:1: no column 'output' in 'time, tokens'"):
        list(rows(table, ("time", "output"), lambda row: row))
    with pytest.raises(TraceError, match=r"table.gz:3: 1 fields, the header has 2"):
        list(rows(table, ("tokens",), lambda row: row))
    table.write_bytes(gzip.compress(b"time,tokens\n1,two\n"))
    with pytest.raises(TraceError, match=r"table.gz:2: invalid literal"):
        list(rows(table, ("tokens",), lambda row: int(row[0])))
