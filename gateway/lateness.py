"""Which requests are overdue, by the measure of the others: how a backend that is slow or stands still is seen before
any of its clocks runs out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf

from gateway.exchange import Attempt
from gateway.pool import Pool

LATE_S = 1.0  # nothing is late before
TIMES = 5.0  # as long as expected


def late(pool: Pool, now: float) -> Iterator[Attempt]:
    """Streams without a first token for five times as long as all prompts there should take, while a request that was
    sent elsewhere in the latter half of that time has had its own. If everything stands still nobody is late."""
    if len(pool.backends) < 2:
        return
    rate = pool.statistics().prefill_rate
    waiting = list(pool.unanswered.values())
    tokens: defaultdict[str, int] = defaultdict(int)
    for attempt in waiting:
        tokens[attempt.backend.name] += attempt.decision.uncached_tokens
    for attempt in waiting:
        waited_s = now - attempt.dispatched_at
        if waited_s < LATE_S or attempt.late:
            continue
        if waited_s < TIMES * tokens[attempt.backend.name] / rate:
            continue
        others = max((at for name, at in pool.served.items() if name != attempt.backend.name), default=-inf)
        if others > attempt.dispatched_at + waited_s / 2:
            yield attempt
