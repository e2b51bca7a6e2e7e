"""The evaluation, as data: which scenarios are compared, at which points, by which figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests import baselines
from loadtests.gateways import ABLATIONS
from loadtests.scenario import Scenario

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A table: each row's settings at each point's. The first row is what the others are compared with, seed by seed.

    `figures` are printed, all are kept. With `curve` it is drawn too, over the named setting.
    """

    name: str
    title: str
    rows: Mapping[str, Settings]
    points: Mapping[str, Settings]
    figures: Sequence[str] = ("goodput",)
    seeds: Sequence[int] = (11, 12, 13, 14, 15)
    curve: str = ""
    note: str = ""

    def scenario(self, row: str, point: str) -> Scenario:
        return Scenario(**{**self.points[point], **self.rows[row]})

    def cells(self) -> list[tuple[Scenario, int]]:
        """Every run that the table needs: the whole table for one seed after the other."""
        return [(self.scenario(row, point), seed) for seed in self.seeds for row in self.rows for point in self.points]


def _points(trace: str, short: str, *loads: float, **more: Any) -> dict[str, Settings]:
    return {f"{short} {load:g}": {"trace": trace, "load": load, **more} for load in loads}


CONVERSATION = _points("conversation", "conv", 1.3, 1.8, 2.4)
SYNTHETIC = _points("synthetic", "synth", 1.0, 1.5, 2.0)
AZURE = _points("azure-chat", "azure", 8.0, 16.0, 24.0, 32.0)
TEN = {**CONVERSATION, **SYNTHETIC, **AZURE}
EIGHT = {name: point for name, point in TEN.items() if name not in ("azure 8", "azure 32")}
THREE = {name: TEN[name] for name in ("conv 2.4", "synth 2", "azure 24")}

EXACT: Settings = {}
REALISM: Settings = {
    "signal_delay_s": 0.01,
    "estimate_error": 0.3,
    "estimate_bias": 1.25,
    "index": "approximate",
    "non_streamed": 0.3,
}
TENANTS: Settings = {**REALISM, "tenants": 5}
TWO: Settings = {**REALISM, "gateways": 2}
# The strongest of the published ones in the main table, for the tables beside it.
RIVALS: Mapping[str, Settings] = {
    name: {"policy": name} for name in ("product", "min-ttft", "min-ttft-reject", "sticky-2s")
}
SMALL: Settings = {"replicas": 1, "profile": "llama-3-8b-a100", "kv_tokens": 16_000, "slo_ttft_s": 30.0}


def _beside_rivals(**settings: Any) -> dict[str, Settings]:
    own = {"headrace, all realism": {**REALISM, **settings}}
    return own | {name: {**policy, **settings} for name, policy in RIVALS.items()}


def _times(points: Mapping[str, Settings], factor: float) -> dict[str, Settings]:
    return {name: {**point, "load": point["load"] * factor} for name, point in points.items()}


EXPERIMENTS: Sequence[Experiment] = (
    Experiment(
        "main",
        "Goodput: share of all arrivals with TTFT <= 1 s + 4 x isolated prefill and TPOT <= 100 ms",
        {
            "headrace, exact knowledge": EXACT,
            "headrace, all realism": REALISM,
            "headrace, all realism, 5 tenants": TENANTS,
            "headrace, all realism, 2 gateways 5 ms": TWO,
            "headrace, all realism, 2 gateways 100 ms": {**TWO, "gateway_delay_s": 0.1},
            **{name: {"policy": name} for name in baselines.names()},
        },
        TEN,
        ("goodput", "goodput_tokens", "ttft_p50", "ttft_p99", "ttft_p99_long", "hit_rate", "rejected"),
        note="Published policies see the exact state of every replica; `headrace` sees it only in the first row.",
    ),
    Experiment(
        "ablation",
        "One rule off at a time, all realism",
        {
            "all rules": REALISM,
            **{f"without {rule}": {**REALISM, "ablate": rule} for rule in ABLATIONS if rule != "shares"},
        },
        EIGHT,
        seeds=(11, 12, 13),
    ),
    Experiment(
        "signals",
        "How late and how wrong the gateway's knowledge may be",
        {
            "exact": EXACT,
            "signals 10 ms late": {"signal_delay_s": 0.01},
            "signals 50 ms late": {"signal_delay_s": 0.05},
            "signals 200 ms late": {"signal_delay_s": 0.2},
            "estimates wrong": {"estimate_error": 0.3, "estimate_bias": 1.25},
            "approximate index": {"index": "approximate"},
            "30 % not streamed": {"non_streamed": 0.3},
            "90 % not streamed": {"non_streamed": 0.9},
            "4 gateways 5 ms": {"gateways": 4},
        },
        THREE,
        seeds=(11, 12, 13),
    ),
    Experiment(
        "chunk-8192",
        "8,192 tokens per engine step",
        _beside_rivals(chunk=8192),
        EIGHT,
        seeds=(11, 12, 13),
    ),
    Experiment(
        "tpot-50ms",
        "A TPOT objective of 50 ms",
        _beside_rivals(slo_tpot_s=0.05),
        EIGHT,
        seeds=(11, 12, 13),
    ),
    Experiment(
        "replicas-4",
        "4 replicas, the load per replica as before",
        _beside_rivals(replicas=4),
        _times(EIGHT, 0.5),
        seeds=(11, 12, 13),
    ),
    Experiment(
        "replicas-16",
        "16 replicas, the load per replica as before",
        _beside_rivals(replicas=16),
        _times(EIGHT, 2.0),
        seeds=(11, 12, 13),
    ),
    Experiment(
        "aggressor",
        "One tenant of five sends ten times its share: what the others get",
        {
            "others alone": {**TENANTS, "aggressor": 10.0, "without": "tenant-3"},
            "fair shares": {**TENANTS, "aggressor": 10.0},
            "without fair shares": {**TENANTS, "aggressor": 10.0, "ablate": "shares"},
            "min-ttft-reject": {"policy": "min-ttft-reject", "tenants": 5, "aggressor": 10.0},
            "vtc": {"policy": "vtc", "tenants": 5, "aggressor": 10.0},
            "dlpm": {"policy": "dlpm", "tenants": 5, "aggressor": 10.0},
        },
        {
            **_times(_points("conversation", "conv", 1.0, 1.4), 1.9),
            **_times(_points("synthetic", "synth", 1.2), 1.9),
            **_times(_points("azure-chat", "azure", 16.0), 1.9),
        },
        ("others_goodput", "others_ttft_p99", "goodput", "jain"),
        note="Points are named by the load without the surplus. Jain over demand-limited shares of all five.",
    ),
    Experiment(
        "classes",
        "60 % interactive, 40 % batch, against the interactive calls alone and against no classes",
        {
            "interactive alone": {**REALISM, "batch": 0.4, "without": "batch"},
            "with batch": {**REALISM, "batch": 0.4},
            "no classes": REALISM,
        },
        {name: TEN[name] for name in ("conv 1.8", "conv 2.4", "synth 1.5", "azure 24")},
        ("goodput", "ttft_p99", "batch_served", "served_tokens"),
    ),
    Experiment(
        "salts",
        "What keeping five tenants' caches apart costs",
        {"shared cache": TENANTS, "salted": {**TENANTS, "salted": True}},
        {**CONVERSATION, **SYNTHETIC},
        ("goodput", "hit_rate"),
        seeds=(11, 12, 13),
    ),
    Experiment(
        "burst",
        "Three times the load for 60 s",
        _beside_rivals(burst=3.0),
        {
            **_points("conversation", "conv", 0.8, 1.2),
            **_points("synthetic", "synth", 0.7),
            **_points("azure-chat", "azure", 10.0),
        },
        ("recovery_s", "goodput"),
        note="recovery_s: from the end of the burst until median and 90th percentile of TTFT are normal (+50 %).",
    ),
    Experiment(
        "arena",
        "27 clients before one small replica: the largest service gap between two that both wait",
        {"headrace": {"ablate": ""}, "fcfs": {"policy": "fcfs"}, "vtc": {"policy": "vtc"}, "dlpm": {"policy": "dlpm"}},
        _points("arena", "arena", 2.0, 4.0, 8.0, tenants=-1, **SMALL),
        ("service_gap", "goodput", "jain"),
        note="VTC's bound is 2 max(w_p L, w_q M) = 64,000 for 16,000 KV tokens.",
    ),
)
# Looked at only after every parameter was fixed.
HELD_OUT: Sequence[Experiment] = (
    Experiment(
        "agentic",
        "Closed loop: Claude Code sessions at work at once; strict = the limit counts only a turn's new tokens",
        {"headrace, all realism": REALISM, "headrace, exact knowledge": EXACT, **RIVALS},
        {f"{n} sessions": {"trace": "agentic", "sessions": n} for n in (16, 32, 48, 64, 96, 128)},
        ("goodput_strict", "goodput", "ttft_p50", "ttft_p99", "hit_rate"),
        seeds=(11, 12, 13),
    ),
    Experiment(
        "servegen",
        "ServeGen: real tenants, each with its own bursts; every client is a tenant",
        _beside_rivals(tenants=-1),
        {
            **_points("servegen-deepseek-r1", "r1", 1.5, 2.5, 4.0),
            **_points("servegen-m-large", "large", 6.0, 10.0, 16.0),
            **_points("servegen-m-small", "small", 12.0, 20.0, 32.0),
        },
        ("goodput", "jain", "ttft_p99"),
        seeds=(11, 12, 13),
    ),
    Experiment(
        "azure-code",
        "Azure code: long prompts, short answers",
        {"headrace, exact knowledge": EXACT, "headrace, all realism": REALISM, **RIVALS},
        _points("azure-code", "code", 8.0, 16.0, 24.0, 32.0),
        ("goodput", "goodput_tokens", "ttft_p99"),
    ),
)
CURVES: Sequence[Experiment] = tuple(
    Experiment(
        f"curve-{trace}",
        f"{trace}: goodput and latency over load",
        {
            "headrace, exact": EXACT,
            "headrace, all realism": REALISM,
            **{
                name: {"policy": name}
                for name in ("round-robin", "cache-aware", "product", "min-ttft-reject", "block-cost-queue")
            },
        },
        _points(trace, "x", *loads),
        ("goodput", "ttft_p50", "ttft_p99", "hit_rate"),
        seeds=(11, 12, 13),
        curve="load",
    )
    for trace, loads in (
        ("conversation", (0.6, 0.9, 1.1, 1.3, 1.5, 1.8, 2.1, 2.4, 3.0)),
        ("synthetic", (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5)),
        ("azure-chat", (6.0, 10.0, 14.0, 16.0, 20.0, 24.0, 28.0, 32.0)),
    )
)
FAIRNESS_CURVE = Experiment(
    "curve-fairness",
    "Five tenants, one sends ten times its share",
    {
        "headrace": {**TENANTS, "aggressor": 10.0},
        "headrace, no shares": {**TENANTS, "aggressor": 10.0, "ablate": "shares"},
        "min-ttft-reject": {"policy": "min-ttft-reject", "tenants": 5, "aggressor": 10.0},
    },
    _points("conversation", "x", 1.0, 1.5, 1.9, 2.3, 2.7, 3.1, 3.6, 4.2),
    ("jain", "others_goodput"),
    seeds=(11, 12, 13),
    curve="load",
)
# To see that the machinery works; its figures mean nothing.
QUICK: Sequence[Experiment] = (
    Experiment(
        "quick",
        "The first requests of each trace",
        {"headrace": REALISM, "min-ttft-reject": {"policy": "min-ttft-reject"}, "fcfs": {"policy": "fcfs"}},
        {name: {**point, "limit": 300} for name, point in THREE.items()},
        ("goodput", "hit_rate"),
        seeds=(1, 2),
    ),
    Experiment(
        "curve-quick",
        "A short curve",
        {"headrace": REALISM, "product": {"policy": "product"}},
        {name: {**point, "limit": 200} for name, point in _points("azure-chat", "x", 8.0, 24.0).items()},
        ("goodput", "ttft_p99"),
        seeds=(1, 2),
        curve="load",
    ),
)
