"""What to look at and to try for each hypothesis: data, and nothing but."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experiment:
    """A change, what it may cost, and by what it is judged."""

    change: str
    trade_off: str
    accept: str


@dataclass(frozen=True, slots=True)
class Advice:
    """`title` says what the hypothesis is; `confirm` and `refute` how to tell."""

    title: str
    confirm: str
    refute: str
    experiments: tuple[Experiment, ...]


ADVICE = {
    "prefill": Advice(
        "Backends take long for prompts",
        "`backend` leads headrace_ttft_part_seconds on every backend, and headrace_prefill_tokens_per_second is below "
        "what the same engine did before; a long prompt alone on an idle backend is slow, too.",
        "The same prompt alone on an idle backend is fast: then it is contention, see saturation.",
        (
            Experiment(
                "Give prefills to more backends (one more replica, or a smaller share of decode beside them).",
                "cost per token rises",
                "ttft kept by 99 % at the same arrivals; itl not worse",
            ),
            Experiment(
                "Raise the engine's prefill budget (vLLM: --max-num-batched-tokens) by half.",
                "each step is longer: gaps between tokens grow",
                "ttft p95 falls by a tenth or more while itl stays kept by 99 %",
            ),
            Experiment(
                "Look for what changed on the backends: version, clocks, neighbours; declare a slow one's `speed`.",
                "none",
                "headrace_prefill_tokens_per_second is back at its old value",
            ),
        ),
    ),
    "cold": Advice(
        "Prefix caches, or backends, are cold",
        "headrace_prefix_confirmed_tokens_total grows at less than half of ..._predicted_...; an engine restarted, or "
        "its prefix caching is off; the share rises by itself within minutes after a restart.",
        "It stays low for hours while the engines' own hit rate is high: others use them, or prompts change early.",
        (
            Experiment(
                "Wait ten minutes after a restart, and see whether the share of found tokens rises.",
                "first tokens stay late meanwhile",
                "found / expected above 0.8",
            ),
            Experiment(
                "Turn the engine's prefix caching on, or give it more KV memory.",
                "less memory for anything else",
                "found / expected above 0.8, ttft p95 lower at the same arrivals",
            ),
            Experiment(
                "Warm a new backend with the common system prompts before it gets traffic.",
                "some minutes later in service",
                "its first tokens are no later than the others' from the first request on",
            ),
        ),
    ),
    "queue": Advice(
        "More work comes than the backends take: it waits here",
        "headrace_queued_requests stays above 0 and `queue` leads headrace_ttft_part_seconds; gates are shut by "
        "prefill, debt, kv or full (headrace_gate).",
        "Gates are open while requests wait, or one tenant's alone wait: then it is a limit or its share.",
        (
            Experiment(
                "Add a backend, or take batch work out of these hours (a lower `ceiling` for its class).",
                "money; batch takes longer",
                "refusals for want of room below 1 %, ttft kept by 99 %",
            ),
            Experiment(
                "Where the gate says `full`: raise the backends' `concurrency` by half.",
                "more streams share a backend: gaps grow",
                "goodput rises while itl stays kept by 99 %",
            ),
            Experiment(
                "Bound what one tenant may send (limits.concurrent), if one has most of the queue.",
                "that tenant gets 429 instead of waiting",
                "the others' ttft kept by 99 %",
            ),
        ),
    ),
    "decode": Advice(
        "Tokens come slowly once they come: decode bandwidth, batch contention or KV pressure",
        "Gaps grow with the number of streams on a backend (batch), with their length (bandwidth), or with the "
        "engine's preemptions (KV).",
        "A single stream on an idle backend is as slow: then it is the hardware or the model, not the load.",
        (
            Experiment(
                "Lower the backends' `concurrency` by a third for an hour.",
                "more waits in the queue, throughput may fall",
                "itl kept by 99 %, goodput not lower",
            ),
            Experiment(
                "Tighten `slo.itl`: the gate then keeps prefills off streams that cannot afford them.",
                "first tokens wait longer",
                "itl kept by 99 %, goodput not lower",
            ),
            Experiment(
                "Smaller weights or KV (quantised), or more bandwidth per replica (tensor parallelism).",
                "quality has to be checked; cost",
                "gaps of a single stream fall in proportion",
            ),
        ),
    ),
    "saturation": Advice(
        "Engines have too much at once: first tokens and gaps suffer together",
        "Both fall together when fewer requests run (lower `concurrency` for ten minutes).",
        "One of them stays bad with half of the streams.",
        (
            Experiment(
                "Lower the backends' `concurrency` until nothing waits inside the engines.",
                "more waits here, where order and refusal are decided",
                "goodput rises, headrace_engine_waiting_requests near 0",
            ),
            Experiment(
                "Refuse sooner: a shorter `max_wait` for the class.",
                "more 503 with Retry-After",
                "goodput of what is taken is above 95 %",
            ),
            Experiment("Add replicas.", "money", "both objectives kept by 99 % at the same arrivals"),
        ),
    ),
    "gateway": Advice(
        "The gateway's own processor: its event loop comes late",
        "headrace_loop_lag_seconds p99 above 50 ms while process_cpu_seconds_total grows by nearly one a second, or "
        "while something else has the machine's cores.",
        "The loop is in time and `gateway` still leads: clients upload slowly.",
        (
            Experiment(
                "Add a gateway replica, or give it a core of its own.",
                "another process to watch; limits then need a shared store",
                "loop lag p99 below 20 ms, all objectives as before",
            ),
            Experiment(
                "Look who else runs on the machine, and at the container's CPU limit (throttling).",
                "none",
                "loop lag p99 below 20 ms at the same load",
            ),
            Experiment(
                "Scrape less often or fewer series (telemetry.tenants), log a sample (telemetry.log_sample).",
                "less to look at",
                "headrace_exposition_seconds and the lag fall",
            ),
        ),
    ),
    "network": Advice(
        "Connecting to backends takes long",
        "`connect` leads headrace_ttft_part_seconds; headrace_upstream_connections shows few kept ones.",
        "Connections are kept and the part stays: the backend accepts late, it is its processor.",
        (
            Experiment(
                "Look at the path: DNS, TLS, a proxy between; let the backend keep connections alive longer.",
                "none",
                "the connect part below 5 ms",
            ),
        ),
    ),
    "failing": Advice(
        "Backends fail or are out",
        "headrace_upstream_failures_total by backend and reason; `headrace backends list` says why.",
        "Failures are spread evenly over all backends: then it is the requests, or the network.",
        (
            Experiment(
                "Drain the backend that fails most, and read its log.",
                "less capacity meanwhile",
                "failures stop; the others keep their objectives",
            ),
        ),
    ),
    "crowding": Advice(
        "One tenant crowds the others out",
        "By tenant: who waits (console), and whose requests miss (headrace_slo_misses_total).",
        "The large tenant's own requests miss, and nobody else's.",
        (
            Experiment(
                "Give it a limit (limits.concurrent), a lower `weight`, or its bulk work the class batch.",
                "it waits longer or gets 429",
                "the others' ttft kept by 99 %",
            ),
        ),
    ),
    "idle": Advice(
        "Engines idle while requests are late: something before them holds the work back",
        "Gates shut although engines run little (headrace_gate), limits of tenants, a `concurrency` set too low, or a "
        "processor that tokenises for all.",
        "Accelerators are busy (their own metrics, which the gateway does not see).",
        (
            Experiment(
                "Double the backends' `concurrency`.",
                "gaps may grow",
                "goodput rises, itl kept by 99 %",
            ),
        ),
    ),
}
