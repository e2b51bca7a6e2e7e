"""Public traces as requests: when they arrive, how long they are, what prefixes they share, who sends them.

`load(name, seed)` gives an open-loop trace at its own pace; `sessions(seed)` the closed-loop one, in which each request
follows the answer to the one before. What a file does not fix (the second inside a 3 s bin, the draws of a generator)
is drawn from the seed. See loadtests/traces/README.md for sources, licences and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from loadtests.tracefile import objects, rows

FOLDER = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `digests`: chained hashes of its leading pieces, of `piece_tokens` each (the last perhaps less)."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    digests: tuple[bytes, ...] = ()
    piece_tokens: int = 512
    client: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, sent `think_s` after the answer to the one before was complete."""

    think_s: float
    request: Request
    new_tokens: int  # of the prompt, since the request before


Session = tuple[Turn, ...]


def names() -> list[str]:
    """The open-loop traces."""
    return sorted(_OPEN)


def load(name: str, seed: int) -> list[Request]:
    """The trace's requests in the order of arrival. Raises TraceError, or ValueError for an unknown name."""
    if name not in _OPEN:
        raise ValueError(f"unknown trace {name!r}; there are {', '.join(names())} and agentic")
    return sorted(_OPEN[name](Random(f"{name} {seed}")), key=lambda request: request.at_s)


def sessions(seed: int, *, max_tokens: int = 120_000, think_cap_s: float = 300.0) -> list[Session]:
    """The Claude Code sessions that never hold more than `max_tokens`, shuffled. Pauses are cut to `think_cap_s`."""
    rng = Random(f"agentic {seed}")

    def parse(row: dict[str, Any]) -> Session:
        return _session(row, think_cap_s) if _longest(row) <= max_tokens else ()

    kept = [session for session in objects(FOLDER / "claude_code_agentic_traces.jsonl.gz", parse) if session]
    rng.shuffle(kept)
    return kept


def _conversation(rng: Random) -> Iterator[Request]:
    # Time stamps are quantised to 3 s: spread inside the bin.
    return _mooncake("mooncake_conversation_trace.jsonl.gz", rng, 3.0)


def _synthetic(rng: Random) -> Iterator[Request]:
    return _mooncake("mooncake_synthetic_trace.jsonl.gz", rng, JITTER_S)


def _mooncake(file: str, rng: Random, spread_s: float) -> Iterator[Request]:
    def parse(row: dict[str, Any]) -> Request:
        length, ids = int(row["input_length"]), row["hash_ids"]
        if len(ids) != -(-length // 512):
            raise ValueError(f"{len(ids)} hash_ids for {length} tokens")
        digests = tuple(int(i).to_bytes(4, "big") for i in ids)
        at_s = int(row["timestamp"]) / 1000 + spread_s * rng.random()
        return Request(at_s, length, int(row["output_length"]), digests)

    return objects(FOLDER / file, parse)


def _azure(file: str, rng: Random) -> Iterator[Request]:
    start: datetime | None = None

    def parse(row: list[str]) -> Request:
        nonlocal start
        at = datetime.fromisoformat(row[0])
        start = start or at
        return Request((at - start).total_seconds() + JITTER_S * rng.random(), int(row[1]), int(row[2]))

    return rows(FOLDER / file, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), parse)


def _arena(rng: Random) -> Iterator[Request]:
    def parse(row: list[str]) -> Request:
        return Request(float(row[1]), int(row[2]), int(row[3]), client=row[0])

    columns = ("client", "arrival_s", "prompt_len", "output_len")
    return rows(FOLDER / "vtc_lmsys_arena_27clients.csv.gz", columns, parse)


def _servegen(file: str, hour: int, rng: Random) -> Iterator[Request]:
    """One hour of the day, each client's rate scaled so that all have SERVEGEN_RATE together.

    Gaps are drawn per window and client from the fitted family and rescaled to fill the window, lengths by
    inverse transform. A client without lengths borrows those of another, drawn by the seed.
    """
    clients = list(objects(FOLDER / file, _client))
    lengths = [client.lengths for client in clients if client.lengths]
    hours = [[w for w in client.windows if hour * 3600 <= w.start_s < (hour + 1) * 3600] for client in clients]
    scale = SERVEGEN_RATE * 3600 / sum(600 * w.rate for windows in hours for w in windows)
    for client, windows in zip(clients, hours, strict=True):
        own = client.lengths or rng.choice(lengths)
        inputs, outputs = own[max((k for k in own if k <= hour * 3600), default=min(own))]
        for window in windows:
            for at_s in _arrivals(window, scale, rng):
                prompt, output = (_draw(quantiles, rng) for quantiles in (inputs, outputs))
                yield Request(window.start_s - hour * 3600 + at_s, prompt, output, client=client.name)


def _arrivals(window: _Window, scale: float, rng: Random) -> list[float]:
    expected = 600 * window.rate * scale
    count = int(expected) + (rng.random() < expected % 1)
    if window.family == "Gamma":
        gaps = [rng.gammavariate(window.shape, 1.0) for _ in range(count + 1)]
    else:
        gaps = [rng.weibullvariate(1.0, window.shape) for _ in range(count + 1)]
    total = sum(gaps) or 1.0
    return [600 * at / total for at in accumulate(gaps[:-1])]


def _draw(quantiles: list[float], rng: Random) -> int:
    at = rng.random() * (len(quantiles) - 1)
    low = quantiles[int(at)]
    return max(1, round(low + (quantiles[int(at) + 1] - low) * (at % 1)))


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    rate: float
    family: str
    shape: float


@dataclass(frozen=True, slots=True)
class _Client:
    name: str
    windows: list[_Window]
    lengths: dict[int, tuple[list[float], list[float]]]  # by the start of a 6 h window


def _client(row: dict[str, Any]) -> _Client:
    windows = [_Window(t, rate, family, shape) for t, rate, _, family, shape, _ in row["trace"]]
    if odd := {window.family for window in windows} - {"Gamma", "Weibull"}:
        raise ValueError(f"unknown family {odd.pop()!r}")
    lengths = {int(k): (v["input_tokens"], v["output_tokens"]) for k, v in (row["dataset"] or {}).items() if v}
    return _Client(f"client-{row['client_id']}", windows, lengths)


def _longest(row: dict[str, Any]) -> int:
    """Tokens of the longest request with its answer, sub-agents' included."""
    return max(_longest(r) if r["type"] == "subagent" else int(r["in"]) + int(r["out"]) for r in row["requests"])


def _session(row: dict[str, Any], think_cap_s: float) -> Session:
    """Ids become global: the tool and system blocks by what they are, so that sessions share them, all others by the
    session. A sub-agent's requests come in turn where it was called: its caller waits for it."""
    turns: list[Turn] = []
    _requests(row, row["id"], think_cap_s, turns)
    return tuple(turns)


def _requests(row: dict[str, Any], name: str, think_cap_s: float, turns: list[Turn]) -> None:
    tools, whole = int(row["tool_tokens"]), int(row["tool_tokens"]) + int(row["system_tokens"])
    known: dict[int, bytes] = {}
    before: list[int] = []
    for request in row["requests"]:
        if request["type"] == "subagent":
            _requests(request, name, think_cap_s, turns)
            continue
        tokens, lcp = int(request["in"]), int(request["lcp"])
        ids = before[:lcp] + [i for low, high in request["new"] for i in range(low, high + 1)]
        if len(ids) != tokens // 64:
            raise ValueError(f"{len(ids)} ids for {tokens} tokens")
        if not known:
            shared = [f"tools {tools} {i}" for i in range(tools // 64)]
            shared += [f"system {tools} {whole} {i}" for i in range(tools // 64, whole // 64)]
            known = {i: label.encode() for i, label in zip(ids, shared, strict=False)}
        for i in ids[lcp:]:
            known.setdefault(i, f"{name} {i}".encode())
        think_s = min(float(request.get("think_time", 0.0)), think_cap_s)
        digests = tuple(known[i] for i in ids)
        turns.append(Turn(think_s, Request(0.0, tokens, int(request["out"]), digests, 64, name), tokens - 64 * lcp))
        before = ids


# Where a file fixes the moment of arrival, seeds differ by this much (seconds at the trace's own pace).
JITTER_S = 1.0
# ServeGen's services differ a hundredfold in rate: all are scaled to this (requests/s).
SERVEGEN_RATE = 10.0
_OPEN: dict[str, Callable[[Random], Iterator[Request]]] = {
    "conversation": _conversation,
    "synthetic": _synthetic,
    "azure-chat": partial(_azure, "azure2023_conv.csv.gz"),
    "azure-code": partial(_azure, "azure2023_code.csv.gz"),
    "arena": _arena,
    # The busiest hour of the day of each.
    "servegen-deepseek-r1": partial(_servegen, "servegen_deepseek-r1_day.jsonl.gz", 22),
    "servegen-m-large": partial(_servegen, "servegen_m-large_day2.jsonl.gz", 12),
    "servegen-m-small": partial(_servegen, "servegen_m-small_day2.jsonl.gz", 9),
}
