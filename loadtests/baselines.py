"""The published policies by name. Each has the scheduler's interface, and the parameters it was published with.

They are granted what no gateway has: the exact state of every replica (caches, uncached tokens still to be computed,
KV memory, requests) at the moment of the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from loadtests import immediate, queued
from loadtests.fleet import Fleet
from loadtests.immediate import Immediate
from loadtests.queued import Queued
from loadtests.router import Router

IMMEDIATE: Mapping[str, Callable[[Fleet, Random], immediate.Choose]] = {
    "round-robin": immediate.round_robin,
    "power-of-two": immediate.power_of_two,
    "least-tokens": immediate.least_tokens,
    "cache-aware": partial(immediate.cache_aware, threshold=0.5, absolute=32, relative=1.1),
    "cache-aware-cli": partial(immediate.cache_aware, threshold=0.3, absolute=64, relative=1.5),
    "bounded-hash": immediate.bounded_hash,
    "blend": immediate.blend,
    "sticky": partial(immediate.sticky, longest_s=18.0),
    "sticky-2s": partial(immediate.sticky, longest_s=2.0),
    "product": immediate.product,
    "min-ttft": partial(immediate.min_ttft, reject=False),
    "min-ttft-reject": partial(immediate.min_ttft, reject=True),
    "block-cost": immediate.block_cost,
}
QUEUED: Mapping[str, tuple[Callable[[Fleet], queued.FirstCome], Callable[[Fleet, Random], queued.Place]]] = {
    "block-cost-queue": (queued.FirstCome, queued.below_threshold),
    "block-cost-wspt": (queued.ShortestFirst, queued.below_threshold),
    "fcfs": (queued.FirstCome, queued.in_memory),
    "vtc": (queued.VirtualTokens, queued.in_memory),
    "dlpm": (queued.PrefixDeficit, partial(queued.in_memory, by_prefix=True)),
}


def names() -> list[str]:
    """All published policies."""
    return [*IMMEDIATE, *QUEUED]


def baseline(name: str, fleet: Fleet, rng: Random) -> Router:
    """A policy for a fleet. Raises ValueError for an unknown name."""
    if name in IMMEDIATE:
        return Immediate(fleet, IMMEDIATE[name](fleet, rng))
    if name not in QUEUED:
        raise ValueError(f"unknown policy {name!r}; there are headrace, {', '.join(names())}")
    order, place = QUEUED[name]
    return Queued(fleet, order(fleet), place(fleet, rng))
