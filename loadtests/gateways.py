"""The gateway's scheduler as the simulation runs it: with its own index or the engines' caches, whole or with a rule
switched off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from random import Random

from loadtests.fleet import Fleet
from loadtests.kvcache import BLOCK_TOKENS
from loadtests.scenario import Scenario
from policies.prefix import PrefixIndex
from policies.rules import Rules
from policies.scheduler import Scheduler
from policies.types import BATCH, INTERACTIVE, BackendView, ClassPolicy

# The scheduler's rules that can be switched off, and how.
ABLATIONS: Mapping[str, Callable[[Rules], Rules]] = {
    "gate": lambda rules: replace(rules, budget_tokens=1 << 40),
    "streams": lambda rules: replace(rules, protect_streams=False),
    "kv": lambda rules: replace(rules, kv_share=1e9),
    "crowding": lambda rules: replace(rules, crowding=0.0),
    "wait": lambda rules: replace(rules, wait_for_warm=False),
    "order": lambda rules: replace(rules, ageing_s=1e-3),  # first come, first served
    "ageing": lambda rules: replace(rules, ageing_s=1e9),  # pure shortest first
    "reserve": lambda rules: replace(rules, reserve=False),
    "refuse": lambda rules: replace(rules, refuse=False),
    "index": lambda rules: replace(rules, index_share=0.0),
    "shares": lambda rules: replace(rules, quantum_tokens=inf, quantum_requests=inf),
}


def scheduler(scenario: Scenario, fleet: Fleet, seed: int, number: int, piece_tokens: int) -> Scheduler:
    """The scheduler of gateway `number`, before the whole fleet. ValueError for an unknown rule to switch off."""
    rules = Rules(objective_s=scenario.slo_tpot_s)
    if scenario.ablate:
        if scenario.ablate not in ABLATIONS:
            raise ValueError(f"unknown rule {scenario.ablate!r}; there are {', '.join(ABLATIONS)}")
        rules = ABLATIONS[scenario.ablate](rules)
    made = Scheduler(
        Random(f"{seed} scheduler {number}"),
        classes=(_unbounded(INTERACTIVE), _unbounded(BATCH)),
        rules=rules,
        piece_tokens=max(piece_tokens, 256),
    )
    if scenario.index == "exact":
        made._pool.index = EngineIndex(fleet, piece_tokens)  # no gateway can have it, so there is no way in but this
    views = [
        BackendView(replica.name, concurrency=scenario.max_seqs, kv_tokens=scenario.kv_tokens)
        for replica in fleet.replicas
    ]
    made.observe(views, 0.0)
    return made


def _unbounded(policy: ClassPolicy) -> ClassPolicy:
    """Without bounds of the queue: refusal by deadline alone keeps it short, and that is what is measured."""
    return replace(policy, max_queued=100_000, max_queued_tokens=1 << 40, max_wait_s=900.0)


class EngineIndex(PrefixIndex):
    """Exact knowledge in the place of the gateway's own index: what is in the engines' caches now."""

    def __init__(self, fleet: Fleet, piece_tokens: int) -> None:
        super().__init__()
        self._fleet = fleet
        self._blocks = piece_tokens // BLOCK_TOKENS
        self._reads = 0

    @property
    def version(self) -> int:
        """Never the same: caches change without a sign."""
        self._reads += 1
        return self._reads

    @version.setter
    def version(self, value: int) -> None:
        """What the base class counts does not matter."""

    def insert(self, prefix: Sequence[bytes], backend: str) -> None:
        """The engines know."""

    def match(self, prefix: Sequence[bytes]) -> tuple[int, dict[str, int]]:
        found = {replica.name: replica.leading(prefix, self._blocks) for replica in self._fleet.replicas}
        common = min(found.values())
        return common, {name: pieces for name, pieces in found.items() if pieces > common}
