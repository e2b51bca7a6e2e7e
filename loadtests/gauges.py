"""What an emulated engine tells at /metrics: vLLM's names, labels and buckets, in Prometheus' text format.

Times are those that the clients see: the engine's own, divided by the speed-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from loadtests.engine import Engine
from loadtests.kvcache import BLOCK_TOKENS

FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket, cumulative only when written out."""

    def __init__(self, name: str, help_: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help_, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, labels: str) -> list[str]:
        edges = [*(f"{float(bound)}" for bound in self.bounds), "+Inf"]
        totals = list(accumulate(self.counts))
        rows = [
            f'{self.name}_bucket{{{labels},le="{edge}"}} {total}.0' for edge, total in zip(edges, totals, strict=True)
        ]
        rows += [f"{self.name}_count{{{labels}}} {totals[-1]}.0", f"{self.name}_sum{{{labels}}} {self.sum}"]
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram", *rows]


class Gauges:
    """The counts of one engine's life. The emulator observes; `text` writes all out."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.finished: Counter[str] = Counter()
        self.first = Histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", FIRST_S
        )
        self.token = Histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", TOKEN_S
        )
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", REQUEST_S
        )
        self.queued = Histogram(
            "vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", REQUEST_S
        )
        self.prompt = Histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", LENGTHS)
        self.output = Histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", LENGTHS)

    def text(self, engine: Engine) -> str:
        labels = f'engine="0",model_name="{self.model}"'
        lines: list[str] = []

        def add(name: str, kind: str, help_: str, *samples: tuple[str, float]) -> None:
            lines.extend([f"# HELP vllm:{name} {help_}", f"# TYPE vllm:{name} {kind}"])
            lines.extend(f"vllm:{name}{{{labels}{extra}}} {float(value)}" for extra, value in samples)

        add("num_requests_running", "gauge", "Number of requests in model execution batches.", ("", engine.running))
        add("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", ("", engine.waiting))
        reasons = [(',reason="capacity"', engine.waiting), (',reason="deferred"', 0)]
        add("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", *reasons)
        add("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", ("", engine.kv_usage))
        for name, help_, value in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                engine.prefix_queries,
            ),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", engine.prefix_hits),
            ("num_preemptions", "Cumulative number of preemption from the engine.", engine.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", engine.prompt_tokens),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", engine.prefix_hits),
            ("generation_tokens", "Number of generation tokens processed.", engine.generated_tokens),
        ):
            add(f"{name}_total", "counter", help_, ("", value))
        ends = [(f',finished_reason="{reason}"', self.finished[reason]) for reason in REASONS]
        add("request_success_total", "counter", "Count of successfully processed requests.", *ends)
        for histogram in (self.first, self.token, self.whole, self.queued, self.prompt, self.output):
            lines += histogram.lines(labels)
        blocks = (
            f'block_size="{BLOCK_TOKENS}",engine="0",enable_prefix_caching="True",num_gpu_blocks="{engine.pool.total}"'
        )
        lines += ["# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig"]
        lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{blocks}}} 1.0"]
        return "\n".join(lines) + "\n"
