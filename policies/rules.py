"""Every constant of the scheduler, with where it comes from.

"Simulated" means: goodput (share of all arrivals that meet both objectives) on the conversation, synthetic and Azure
traces before 8 engines, around and past saturation; `python -m loadtests.simulate` repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """How the scheduler decides. Tokens and seconds; the defaults are meant to be kept."""

    # Time per output token that a stream is promised.
    objective_s: float = 0.1

    # Uncached tokens that may be in flight on a backend: two steps of a common engine (2,048), one computing while
    # the next is on its way. 2,048 .. 6,144 within half a point; 512 costs two points on short prompts, 16k up to
    # sixteen on long ones. Not to be scaled with the engine's chunk (8,192 at chunk 8,192: no gain).
    budget_tokens: int = 4096

    # Whether a prefill waits until each stream beside it can afford what it will lose.
    protect_streams: bool = True
    # What it is expected to lose is multiplied by this.
    loss_margin: float = 1.2
    # It waits at most this many times its own length. An engine that decodes slower than the objective even
    # undisturbed never saves anything: without a bound it would serve one stream at a time for ever.
    longest_break: float = 1.0

    # Share of a backend's KV memory that is planned for. Expected outputs are means and engines preempt near 1.
    # .9 against no limit: +0.2 points, +1.2 on long conversations.
    kv_share: float = 0.9

    # Price of a prefill for each request that runs beside it, in shares of its own tokens. 0 .. 10 are equal under
    # open load; under sessions .3 spreads them (+5 points against none).
    crowding: float = 0.3

    # Waiting for a warm backend pays from so many tokens saved, and this share of them, while more than `patience`
    # of the time that may be waited is left. Without a threshold noise makes requests wait for nothing (-3 points).
    save_tokens: int = 512
    save_share: float = 0.1
    patience: float = 0.3
    wait_for_warm: bool = True
    # What is computed anew elsewhere displaces what others had cached there, who compute it anew in turn: that costs so
    # many times its own time on top. Sessions that keep more than the caches hold: +3 to +8 points against 0, else
    # nothing is lost; 1 .. 3 are equal.
    displacement: float = 2.0

    # A wait so long weighs as much as a prompt e times shorter: 40 .. 160 s within half a point. Earliest deadline
    # first loses 2 points, first come first served 18.
    ageing_s: float = 80.0

    # Whether the first in order, when it fits nowhere, has a backend drained for it. Without it short prompts
    # overtake for ever: a light tenant's 3k prompts met their objective in 13 % of cases beside a flood, 95 % with it.
    reserve: bool = True

    # Whether what cannot meet its deadline even if served next is refused. Without it -7 points, far past
    # saturation -40.
    refuse: bool = True

    # How far one tenant's service may run ahead of the least served one's: a few requests, at most so many tokens.
    # 4k .. 256k differ little, 4k costs most; but a flood of small requests fits 64k a hundred times over.
    quantum_tokens: float = 64_000
    quantum_requests: float = 6.0

    # Output tokens are charged as this many input tokens (VTC, Sheng et al., OSDI 2024).
    output_weight: int = 2

    # A ticket stands in the lanes of at most so many warm backends.
    lanes: int = 4

    # The index mirrors this share of the engine's KV memory: .5 and 1 are equal, 2 costs 3 points. Where the memory
    # is unknown, `index_tokens` is a guess.
    index_share: float = 1.0
    index_tokens: int = 100_000

    # Another gateway's job goes first when its order is better by more than this (0 makes them wait for each other).
    peer_margin: float = 0.2
    # What a peer said is forgotten after so long without a word from it.
    peer_silence_s: float = 3.0

    # The prefill of an answer that does not stream ends unseen. Streams beside it tell: their steps take less than
    # `unseen_pace` times what they take without a prefill. It is waited for up to `unseen_bound` times what was
    # expected, and without such streams for just that. With 30 % not streamed and estimates off by 30 %: +1 point;
    # 1.3 .. 2 times the pace and 1.5 .. 3 times the expected are within half a point.
    unseen_pace: float = 1.5
    unseen_bound: float = 2.0

    # A prefill rate to begin with, in tokens per second, believed like a prefill of `prior_tokens`. Nothing is refused
    # for its deadline until `samples` prefills were timed.
    prefill_rate: float = 10_000.0
    prior_tokens: float = 5000.0
    samples: int = 8
    # Weight of the prefill before: a memory of a hundred.
    keep: float = 0.99
