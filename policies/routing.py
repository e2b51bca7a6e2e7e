"""Where a ticket goes, of the backends that can take it; and which one that cannot is worth waiting for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from random import Random
from typing import NamedTuple

from policies.backend import Backend, Ticket
from policies.estimate import Prefills
from policies.prefix import favourite
from policies.rules import Rules


class Load(NamedTuple):
    """What a price may know beside the ticket and the backend: the time, what prefills take, and what each backend
    would run on average if one more came."""

    now: float
    times: Prefills
    mean_running: float
    rules: Rules


Price = Callable[[Ticket, Backend, Load], float]


def round_robin(ticket: Ticket, backend: Backend, load: Load) -> float:
    """Whoever was chosen longest ago."""
    return backend.turn


def least_requests(ticket: Ticket, backend: Backend, load: Load) -> float:
    """Whoever runs least, by speed."""
    return backend.running / backend.view.speed


def least_tokens(ticket: Ticket, backend: Backend, load: Load) -> float:
    """Whoever has least to prefill; then, as one token each, whoever runs fewer requests."""
    return (backend.in_flight + backend.running) / backend.view.speed


def prefix_affinity(ticket: Ticket, backend: Backend, load: Load) -> float:
    """Whoever holds most of the prompt, unless it runs a quarter more than the mean (consistent hashing with bounded
    loads, Mirrokni et al. 2018); then whoever runs least. Two requests over the bound are let pass, or a pool that
    runs next to nothing would have no affinity at all."""
    if backend.running < ceil(1.25 * load.mean_running) + 2:
        return float(ticket.uncached(backend.name) - ticket.job.prompt_tokens - 1)
    return float(backend.running)


def marginal_delay(ticket: Ticket, backend: Backend, load: Load) -> float:
    """Seconds of the prefills that are left there, plus this one's, which delay every request that runs beside it."""
    crowd = 1.0 + load.rules.crowding * backend.running
    time = load.times.expect(ticket.uncached(backend.name), ticket.job.prompt_tokens)
    return backend.left(load.now) + time * crowd / backend.view.speed


PRICES: Mapping[str, Price] = {
    "round_robin": round_robin,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "prefix_affinity": prefix_affinity,
    "price": marginal_delay,
}


def pick(considered: list[tuple[float, str]], key: bytes | None, rng: Random) -> str:
    """The cheapest. Of equals the favourite of the prompt's first new piece, so that replicas with empty indices place
    a prompt alike; at random where there is none (a fixed order would pile everything onto the first)."""
    best = min(considered)[0]
    equal = [name for price, name in considered if price == best]
    if len(equal) == 1:
        return equal[0]
    return favourite(key, equal) if key else rng.choice(equal)


def warmer(ticket: Ticket, chosen: Backend, shut: Iterable[Backend], load: Load) -> Backend | None:
    """The shut backend that would have computed the prompt at less cost than `chosen`, if it saves enough to wait for:
    until the one has, or what the other takes and displaces."""
    rules, whole = load.rules, ticket.job.prompt_tokens
    cost = ticket.uncached(chosen.name)
    enough = cost - max(rules.save_tokens, rules.save_share * cost)
    best, soonest = None, (1.0 + rules.displacement) * load.times.expect(cost, whole) / chosen.view.speed
    for backend in shut:
        warm = ticket.uncached(backend.name)
        if (
            warm <= enough
            and (time := backend.left(load.now) + load.times.expect(warm, whole) / backend.view.speed) < soonest
        ):
            best, soonest = backend, time
    return best
