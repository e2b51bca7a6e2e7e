"""The replicas of a simulated pool, and what can be known of them at a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Digests

from loadtests.engine import Engine, Sequence, Step
from loadtests.profiles import S
from loadtests.scenario import Scenario


class Replica:
    """One engine, the requests on it, and its steps that are not yet over at the moment of the simulation."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.running = 0  # requests dispatched here that have not ended
        self.prefilling: dict[object, tuple[int, int]] = {}  # of those without a first token: see `dispatched`
        self.queued_tokens = 0  # their uncached tokens in all
        self.queued_ps = 0  # and the time that computing those takes
        self.version = 0  # of the plan to wake it
        self._steps: deque[Step] = deque()
        self._ended = 0  # steps that are over and forgotten

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.engine!r}>"

    def dispatched(self, sequence: Sequence) -> None:
        """`sequence` goes there now; the engine is `advance`d to the moment."""
        uncached = sequence.prompt_tokens - self.engine.match(sequence)
        time_ps = self.engine.profile.prefill_ps(
            sequence.prompt_tokens, self.engine.chunk, sequence.prompt_tokens - uncached
        )
        self.engine.submit(sequence)
        self.running += 1
        self.prefilling[sequence.id] = uncached, time_ps
        self.queued_tokens += uncached
        self.queued_ps += time_ps

    def prefilled(self, sequence: Sequence) -> None:
        """Its first token is out."""
        uncached, time_ps = self.prefilling.pop(sequence.id)
        self.queued_tokens -= uncached
        self.queued_ps -= time_ps

    def advance(self, until_ps: int) -> list[Step]:
        """Start all steps before that moment."""
        steps = self.engine.advance(until_ps)
        self._steps.extend(steps)
        return steps

    def leading(self, digests: Digests[bytes], blocks: int) -> int:
        """How many leading pieces of `blocks` blocks are cached. What is cached of a prompt is always its head."""
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            piece = self.engine.pool.find(digests[middle])
            if piece is not None and piece.blocks >= blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def look(self, now_ps: int) -> tuple[int, int | None]:
        """Engine steps that are over at that moment, and when the next one will be: None while that depends on what is
        still to be scheduled. The moment is not before the last one asked for. Nothing is simulated."""
        steps = self._steps
        while steps and steps[0].end_ps <= now_ps:
            self._ended += steps.popleft().steps
        if not steps:
            over = self.engine.silent_until(now_ps)
            return self._ended + over, self.engine.silent_end_ps(over)
        step = steps[0]
        if step.steps == 1:
            return self._ended, step.end_ps
        profile, batch, context = self.engine.profile, step.batch, step.context_tokens
        over = profile.decoding_steps(max(0, now_ps - step.start_ps), batch, context)
        return self._ended + over, step.start_ps + profile.decoding_ps(over + 1, batch, context)


class Fleet:
    """All replicas, and every request that is in the system.

    What the published policies are granted, exact state, is asked of it; whoever asks sees to it first that the
    replicas are `advance`d to the moment.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.replicas = [
            Replica(
                f"r{i}",
                Engine(scenario.engine, chunk=scenario.chunk, kv_tokens=scenario.kv_tokens, max_seqs=scenario.max_seqs),
            )
            for i in range(scenario.replicas)
        ]
        self.by_name = {replica.name: replica for replica in self.replicas}
        self.sequences: dict[int, Sequence] = {}
        self.homes: dict[int, Replica] = {}  # where each that was dispatched is

    def uncached(self, job_id: int) -> list[int]:
        """Tokens of the prompt that are not in each replica's cache."""
        sequence = self.sequences[job_id]
        if not sequence.digests:
            return [sequence.prompt_tokens] * len(self.replicas)
        return [sequence.prompt_tokens - replica.engine.match(sequence) for replica in self.replicas]

    def queued(self) -> list[int]:
        """Uncached tokens of the requests on each replica that have no first token yet: what a router that sees all
        requests counts for itself, exactly."""
        return [replica.queued_tokens for replica in self.replicas]

    def queued_s(self) -> list[float]:
        """The time that computing those would take alone."""
        return [replica.queued_ps / S for replica in self.replicas]

    def requests(self) -> list[int]:
        """Requests on each replica, waiting or running."""
        return [replica.running for replica in self.replicas]

    def waiting(self) -> list[int]:
        """Requests in each replica's own queue."""
        return [replica.engine.waiting for replica in self.replicas]

    def kv_usage(self) -> list[float]:
        """Share of each replica's KV memory that is held."""
        return [replica.engine.kv_usage for replica in self.replicas]

    def emitted(self, job_id: int) -> int:
        """Tokens of the answer that came out so far."""
        home = self.homes.get(job_id)
        return home.engine.emitted(self.sequences[job_id]) if home else 0
