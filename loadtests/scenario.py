"""One simulated experiment: which traffic, before which replicas, behind which policy, seen how well."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.profiles import PROFILES, Profile, S

# Shares of five tenants, as of the evaluation of record; the fourth can be made an aggressor.
SHARES = (0.50, 0.20, 0.15, 0.10, 0.05)


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on beside its seed. Times in seconds; shares in [0, 1]; `load` multiplies the trace's
    own pace. The defaults are the set-up of record: Qwen3-32B on 8 x 2 H100 with exact knowledge."""

    trace: str = "conversation"
    load: float = 1.0
    policy: str = "headrace"
    ablate: str = ""  # a rule of the scheduler to switch off, see simulate.RULES
    # What the gateway knows.
    signal_delay_s: float = 0.0
    estimate_error: float = 0.0  # sigma of the logarithm
    estimate_bias: float = 1.0
    index: str = "exact"  # or approximate: the gateway's own
    non_streamed: float = 0.0
    # Who sends.
    tenants: int = 0  # 0: the trace's own clients, if it has any, are one tenant; -1: each client is a tenant
    aggressor: float = 1.0  # times its share that the fourth tenant sends
    without: str = ""  # leave out the calls of this tenant or class, all others as if they were there
    salted: bool = False  # tenants share no cache
    batch: float = 0.0  # share of the requests in the batch class
    sessions: int = 32  # users at work at once (agentic)
    burst: float = 1.0  # times the load for a minute in the middle
    limit: int = 0  # only so many requests of the trace (0: all)
    # The pool.
    replicas: int = 8
    profile: str = "qwen3-32b-h100"
    kv_tokens: int = 250_000
    chunk: int = 2048
    max_seqs: int = 256
    gateways: int = 1
    gateway_delay_s: float = 0.005
    # The objectives: TTFT <= slo_ttft_s + slo_prefills x the prefill alone on an idle replica, mean TPOT <= slo_tpot_s.
    slo_ttft_s: float = 1.0
    slo_prefills: float = 4.0
    slo_tpot_s: float = 0.1

    @property
    def engine(self) -> Profile:
        return PROFILES[self.profile]

    def isolated_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """The prefill alone on an idle replica."""
        return self.engine.prefill_ps(prompt_tokens, self.chunk, cached_tokens) / S

    def ttft_limit_s(self, prompt_tokens: int) -> float:
        return self.slo_ttft_s + self.slo_prefills * self.isolated_s(prompt_tokens)
