"""What one step of an engine costs: named pairs of a model and the GPUs that it runs on.

The step time of a continuously batching engine is modelled as

    max(weights, token * n) + attention * sum q (c + q/2) + kv * sum c_decoding + overhead + sequence * batch

where n tokens are computed, q of them for a prompt of which c tokens are already in the cache. Coefficients: `weights`
and `token` from Vidur's published profiles (microsoft/vidur, MIT) where it has the pair, else from bandwidth and
measured prefill rates (Qwen3-32B on two H100: 8,192 tokens in 0.40 s); `attention` = 4 heads x head size x layers over
45 % of the peak; `kv` = bytes per token over 80 % of the bandwidth; `overhead` and `sequence` from the trained physics
of BLIS (32.1 us per layer + 126 us; 4.4 us per sequence), none for Qwen3, whose measured prefill leaves no room for it.

All times are whole picoseconds, so that many steps added at once are exactly the same steps added one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

NS, US, MS, S = 10**3, 10**6, 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs in picoseconds: per step, token, pair of tokens (an even number: it is halved), cached token of a decode,
    step, sequence; and the KV capacity in tokens."""

    name: str
    weights_ps: int
    token_ps: int
    attention_ps: int
    kv_ps: int
    overhead_ps: int
    kv_tokens: int
    sequence_ps: int = 4400 * NS

    def step_ps(self, decodes: int, context_tokens: int, prefills: int, prefill_tokens: int, pairs: int) -> int:
        """One step; `pairs` is the sum of q (2c + q) over its prefill chunks, twice the attention pairs."""
        return (
            max(self.weights_ps, self.token_ps * (decodes + prefill_tokens))
            + self.attention_ps * pairs // 2
            + self.kv_ps * context_tokens
            + self.overhead_ps
            + self.sequence_ps * (decodes + prefills)
        )

    def decoding_ps(self, steps: int, decodes: int, context_tokens: int) -> int:
        """`steps` steps on end in which only the same `decodes` sequences each gain a token; context at their start."""
        fixed = max(self.weights_ps, self.token_ps * decodes) + self.overhead_ps + self.sequence_ps * decodes
        context = steps * context_tokens + decodes * (steps * (steps - 1) // 2)
        return steps * fixed + self.kv_ps * context

    def decoding_steps(self, within_ps: int, decodes: int, context_tokens: int) -> int:
        """How many such steps have ended after that time: the largest n with decoding_ps(n, ...) <= within_ps."""
        a = self.kv_ps * decodes  # 2 decoding_ps(n) = a n^2 + b n
        b = 2 * self.decoding_ps(1, decodes, context_tokens) - a
        n = (isqrt(b * b + 8 * a * within_ps) - b) // (2 * a) if a else 2 * within_ps // b
        while self.decoding_ps(n, decodes, context_tokens) > within_ps:
            n -= 1
        return n

    def prefill_ps(self, tokens: int, chunk_tokens: int, cached_tokens: int = 0) -> int:
        """Computing a prompt alone on an idle engine, from the first token that is not cached to the first answer."""
        at = min(cached_tokens, tokens - 1)
        chunks, rest = divmod(tokens - at, chunk_tokens)
        steps = chunks * max(self.weights_ps, self.token_ps * chunk_tokens)
        if rest:
            steps += max(self.weights_ps, self.token_ps * rest)
            chunks += 1
        # The sum of q (2c + q) over all chunks is tokens^2 - at^2.
        attention = self.attention_ps * (tokens**2 - at**2) // 2
        return steps + attention + chunks * (self.overhead_ps + self.sequence_ps)


_PROFILES = (
    Profile("llama-3-8b-h100", 6 * MS, 21 * US, 1178, 49 * NS, 1153 * US, 430_000),
    Profile("llama-3-8b-a100", 9700 * US, 66400 * NS, 3734, 80 * NS, 1153 * US, 430_000),
    Profile("llama-3-70b-h100", 14300 * US, 54 * US, 1474, 31 * NS, 2694 * US, 420_000),
    Profile("llama-3-70b-a100", 25 * MS, 157 * US, 4668, 51 * NS, 2694 * US, 420_000),
    Profile("qwen3-32b-h100", 12 * MS, 39 * US, 2356, 49 * NS, 0, 307_000, 0),
)
PROFILES = {profile.name: profile for profile in _PROFILES}
