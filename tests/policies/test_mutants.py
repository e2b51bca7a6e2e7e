"""Whether the properties would notice: policies that are broken by hand in one place each, and must be found out.

A mutant is a replacement in the source of one module. A process of its own imports the policies with it and lets the
random worlds of `tests.policies.chance` and the scenes of `test_scheduler` run until a promise is broken. One that
survives is a promise that nobody checks.
"""

# ruff: noqa: E501 (sources are quoted as they stand)
from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What is broken: the module, what stands there, and what stands there instead.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "a slot is never given back": (
        "backend",
        "        self.running -= 1\n",
        "        self.running -= 0\n",
    ),
    "KV tokens are never given back": ("backend", "        self.kv -= slot.kv\n", "        pass\n"),
    "a failed job keeps its slot": (
        "running",
        "            slot.backend.end(slot, now)\n",
        "            if ending is not Ending.DROPPED:\n                slot.backend.end(slot, now)\n",
    ),
    "one request too many": ("admission", "backend.running >= view.concurrency", "backend.running > view.concurrency"),
    "one request too few": (
        "admission",
        "backend.running >= view.concurrency",
        "backend.running + 1 >= view.concurrency",
    ),
    "one token too many": (
        "admission",
        "fit = backend.in_flight <= room",
        "fit = backend.in_flight <= room + 1000",
    ),
    "KV memory is not looked at": (
        "admission",
        "self.kv(backend) > self.rules.kv_share * view.kv_tokens",
        "False",
    ),
    "a closed backend is used": (
        "admission",
        "if not view.open:\n            return Gate.CLOSED\n        if b",
        "if b",
    ),
    "backends that were tried are used again": (
        "admission",
        "return [b for b in fits if ticket.job.allows(b.name)] if ticket.restricted else fits",
        "return fits",
    ),
    "a flow stays stale after its head has gone": (
        "lanes",
        "            elif lane.shown is item:\n                lane.show()\n",
        "",
    ),
    "a flow that had too much is never shown again": (
        "lanes",
        "            elif lane.later:\n                lane.later = False\n                lane.show()\n",
        "            elif lane.later:\n                lane.later = False\n",
    ),
    "a ticket that left is still shown": ("queues", "        ticket.stamp += 1\n", "        pass\n"),
    "the queue's tokens are not taken off": (
        "queues",
        "        self.tokens -= ticket.job.prompt_tokens\n",
        "        pass\n",
    ),
    "nobody is charged": ("queues", "        self._serve(flow, cost / ticket.job.weight)\n", "        pass\n"),
    "charged without regard to weight": ("queues", "cost / ticket.job.weight", "cost"),
    "charged without settling": (
        "running",
        "            self._room.settle(slot, ending, usage)\n",
        "",
    ),
    "whoever returns from idle has saved up": (
        "queues",
        "            flow.served = max(flow.served, self._floor(ticket))\n",
        "            pass\n",
    ),
    "no shares at all": ("scheduler", "if shares else (inf, inf)", "if False else (inf, inf)"),
    "the quantum is not kept": ("queues", "self._least() + self.quantum)", "self._least() + 99 * self.quantum)"),
    "the shortest always goes first": (
        "queues",
        "job.arrived / ageing_s + log1p(uncached)",
        "-job.arrived / ageing_s - log1p(uncached)",
    ),
    "the gate stays shut after an error before the first token": (
        "backend",
        "        if slot.prefilling:\n            slot.paced = False\n            self.prefilled(slot, now)\n        elif",
        "        if slot.prefilling:\n            slot.paced = False\n        elif",
    ),
    "the gate opens only at the end": (
        "running",
        "            slot.backend.prefilled(slot, now)\n            slot.backend.stream(slot, now)\n",
        "            slot.backend.stream(slot, now)\n",
    ),
    "an unseen prefill never ends": (
        "unseen",
        "            slot = heappop(self._ends)[2]\n",
        "            return []\n",
    ),
    "debt is never paid when all streams end": (
        "backend",
        "self.marks[-1] if self.marks and self.streams else -inf",
        "self.marks[-1] if self.marks else -inf",
    ),
    "a break for the streams has no end": ("admission", "if now >= backend.idle_since + longest:", "if False:"),
    "nobody is woken when a break is over": (
        "admission",
        "        backend.open_at = min(backend.open_at, backend.idle_since + longest)\n",
        "",
    ),
    "nobody is woken when the credit suffices": (
        "admission",
        "        backend.need_s = min(backend.need_s, loss)\n",
        "",
    ),
    "the queue has no bound": ("scheduler", "if self._room.tier(ticket).full(ticket.job):", "if False:"),
    "the queue has one place too many": (
        "waiting",
        "queue.requests >= policy.max_queued",
        "queue.requests > policy.max_queued",
    ),
    "a tenant has no bound": ("waiting", "own_requests > 0\n", "False\n"),
    "nobody waits too long to be served": (
        "scheduler",
        "        late = self._room.ripe(now, self._latest)\n",
        "        late = []\n",
    ),
    "the timer of a waiter is not set": ("waiting", "        if when < inf:\n", "        if when < 0:\n"),
    "batch has no ceiling": ("waiting", "tier.policy.ceiling < 1.0 and tier.owed <= 0.0", "False"),
    "batch has no floor": ("waiting", "tier.owed + tier.policy.floor * cost", "tier.owed + 0.0 * cost"),
    "batch goes first": ("waiting", "key=lambda tier: tier.owed <= 0.0", "key=lambda tier: tier.policy.ceiling >= 1.0"),
    "a restarted backend keeps what it had": (
        "pool",
        "if view is None or view.incarnation != backend.view.incarnation:",
        "if view is None:",
    ),
    "waiters for a backend that is gone stay": (
        "scheduler",
        "                self._lost.append(ticket)\n",
        "                pass\n",
    ),
    "one that was dispatched stays in the queue": (
        "waiting",
        "tier.owed = min(tier.owed + tier.policy.floor * cost, self.rules.quantum_tokens)\n        self.remove(ticket)\n",
        "tier.owed = min(tier.owed + tier.policy.floor * cost, self.rules.quantum_tokens)\n",
    ),
    "the head is passed over for ever": (
        "scheduler",
        "            self._room.tier(ticket).queue.show(ticket)\n",
        "            pass\n",
    ),
    "a prompt that is no longer warm keeps its turn": (
        "scheduler",
        "if self._pool.assess(ticket):",
        "if self._pool.assess(ticket) and False:",
    ),
    "what has become shorter is seen one look later": (
        "scheduler",
        "                again = bool(held)\n                continue\n",
        "                continue\n",
    ),
    "one that was held is woken when it once should have been": ("waiting", "if latest < ticket.wake:", "if False:"),
    "parked for ever": (
        "waiting",
        "                ticket.parked = False\n                self.requeue(ticket)\n",
        "                self.requeue(ticket)\n",
    ),
    "an explanation changes what it explains": ("choice", "unmoved = Random(0)", "unmoved = self._rng"),
    "an explanation is told as a wish": (
        "pool",
        "            backend.need_s, backend.open_at = need_s, open_at\n",
        "            pass\n",
    ),
    "a silent gateway is never forgotten": ("pool", "if now >= heard + self.rules.peer_silence_s:", "if False:"),
    "nobody is woken when a gateway falls silent": ("scheduler", "self._pool.next_silence(), ", ""),
    "chance is not the given one": ("choice", "self._rng = rng", "self._rng = Random()"),
}
FULL = bool(os.environ.get("HEADRACE_FULL_TESTS"))
HUNTED = list(MUTANTS) if FULL else list(MUTANTS)[::2]  # the ordinary suite can afford half of them


def hunt(name: str) -> str:
    """What gave the mutant away; empty if it survived."""
    module, old, new = MUTANTS[name]
    source = (ROOT / "policies" / f"{module}.py").read_text()
    assert source.count(old) >= 1, f"{name}: {module}.py has changed, the mutant must follow"
    command = [sys.executable, "-m", "tests.policies.mutant", module]
    found = subprocess.run(
        command, cwd=ROOT, input=f"{old}\0{new}", capture_output=True, text=True, timeout=100, check=False
    )
    return "" if found.returncode == 0 else found.stderr.strip().rpartition("\n")[2] or "died"


@pytest.mark.timeout(300)
def test_every_mutant_is_found_out() -> None:
    """No survivor; and what gives a mutant away is a broken promise, not that it cannot be imported."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(HUNTED, pool.map(hunt, HUNTED), strict=True))
    assert [name for name, how in found.items() if not how] == []
    wrong = ("SyntaxError", "IndentationError", "ImportError", "NameError")
    assert [(name, how) for name, how in found.items() if how.startswith(wrong)] == []


def test_the_unbroken_policies_pass_the_same_hunt() -> None:
    """With nothing replaced the hunt finds nothing: a mutant is not killed by the hunter."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.policies.mutant", "types"],
        cwd=ROOT,
        input="x\0x",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
