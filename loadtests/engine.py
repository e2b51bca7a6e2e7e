"""A model of an inference engine: continuous batching with chunked prefill, as in vLLM's V1 scheduler. Pure.

One step has a budget of `chunk` tokens. In order: (1) every decoding sequence takes one token; (2) the prompt that is
partly computed takes what is left; (3) waiting prompts are admitted first come, first served, while budget, memory and
`max_seqs` last. At most one prompt is partly computed between steps, since the next is admitted only with what it
leaves over. A sequence that needs a block when none is left preempts the one admitted last, perhaps itself; that one
loses its blocks (they stay cached while they can), goes to the head of the queue and is computed anew, and no new
prompt is admitted in such a step.

The cost of a step depends on sums only, and the decoding batch is kept as sums, so a step costs the same for any batch,
and a stretch of steps that change nothing but these sums is taken at once (`advance`), to exactly the same state as
one by one (`step`). What a sequence has emitted follows from the number of steps since it began to decode.

Time is whole picoseconds on the engine's own clock, which moves by steps; an idle engine's moves with `advance`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, KeysView
from dataclasses import dataclass

from loadtests.batch import Batch, Sequence
from loadtests.kvcache import BLOCK_TOKENS, BlockPool, BlockTable, blocks_for
from loadtests.profiles import Profile, S

__all__ = ["Engine", "Sequence", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did, or `steps` decode-only steps on end of which only the last may finish a sequence.

    In every one of them `batch` sequences emitted one token each: all that are `Engine.decoding` after it, and all in
    `finished`. Those in `first` emitted their first token, at `end_ps`. `context_tokens`: of those that decoded.
    """

    steps: int
    start_ps: int
    end_ps: int
    batch: int
    context_tokens: int
    first: tuple[Sequence, ...] = ()
    finished: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def duration_s(self) -> float:
        return (self.end_ps - self.start_ps) / S


class Engine:
    """One replica. `chunk` and `kv_tokens` in tokens (whole blocks of KV memory are used)."""

    def __init__(
        self, profile: Profile, *, chunk: int = 2048, kv_tokens: int | None = None, max_seqs: int = 256
    ) -> None:
        if chunk <= max_seqs:
            raise ValueError(f"chunk {chunk} must exceed max_seqs {max_seqs}: a full batch would leave no prefill")
        self.profile, self.chunk, self.max_seqs = profile, chunk, max_seqs
        self.pool = BlockPool((kv_tokens or profile.kv_tokens) // BLOCK_TOKENS)
        self.clock_ps = 0
        self.steps = 0
        # Counters over the engine's life, in tokens but the last: of prompts computed, of answers, of prompts looked up
        # in the cache and found there.
        self.prompt_tokens = self.generated_tokens = self.prefix_queries = self.prefix_hits = self.preemptions = 0
        self._waiting: OrderedDict[Hashable, Sequence] = OrderedDict()
        self._running: dict[Hashable, Sequence] = {}  # in the order of admission
        self._batch = Batch()
        self._partial: Sequence | None = None
        self._blocked = False  # the head of the queue did not fit, and nothing was freed since
        self._silent: int | None = None  # what `_decode_only` last said, until something changes

    def __repr__(self) -> str:
        return f"<Engine {self.profile.name} [{self.running} running, {self.waiting} waiting | {self.pool!r}]>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def decoding(self) -> KeysView[Hashable]:
        """The ids of the sequences that are past their first token."""
        return self._batch.members.keys()

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, in [0, 1]; a block that is only cached is free."""
        return self.pool.held / self.pool.total

    def match(self, sequence: Sequence) -> int:
        """Leading tokens of the prompt that are in the cache now; also for a sequence that was not submitted."""
        limit = (sequence.prompt_tokens - 1) // BLOCK_TOKENS
        return sequence.blocks(self.pool).lookup(limit)[0] * BLOCK_TOKENS

    def emitted(self, sequence: Sequence) -> int:
        """Tokens that came out of it up to the last step."""
        return sequence.emitted + (self.steps - sequence.born if sequence.id in self._batch.members else 0)

    def submit(self, sequence: Sequence) -> None:
        """Queue it. Raises ValueError if it could never run or its id is here already."""
        if sequence.id in self._running or sequence.id in self._waiting:
            raise ValueError(f"sequence {sequence.id!r} is here already")
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 1:
            raise ValueError(f"sequence {sequence.id!r} has no prompt or no output")
        if sequence.digest_tokens < BLOCK_TOKENS or sequence.digest_tokens % BLOCK_TOKENS:
            raise ValueError(f"digest_tokens {sequence.digest_tokens} is not a multiple of {BLOCK_TOKENS}")
        if blocks_for(sequence.prompt_tokens + sequence.output_tokens) > self.pool.total:
            raise ValueError(f"sequence {sequence.id!r} is longer than the KV memory")
        sequence.table = sequence.blocks(self.pool)
        sequence.target = sequence.prompt_tokens
        self._blocked = self._blocked and bool(self._waiting)
        self._silent = None
        self._waiting[sequence.id] = sequence

    def cancel(self, id: Hashable) -> bool:  # noqa: A002
        """Forget a sequence, between two steps; what was computed stays cached. False if it is not here."""
        if sequence := self._running.get(id):
            self._release(sequence)
        elif self._waiting.pop(id, None) is None:
            return False
        self._blocked, self._silent = False, None
        return True

    def step(self) -> Step:
        """Run one step. The engine must not be idle."""
        preempted = self._make_room()
        decodes, context = len(self._batch), self._batch.context_tokens
        chunks = self._schedule(self.chunk - decodes, preempted)
        tokens = sum(q for _, q in chunks)
        pairs = sum(q * (2 * sequence.computed - q) for sequence, q in chunks)  # q (2c + q) before it was computed
        duration_ps = self.profile.step_ps(decodes, context, len(chunks), tokens, pairs)
        return self._end(
            1, duration_ps, [sequence for sequence, _ in chunks if sequence is not self._partial], preempted
        )

    def advance(self, until_ps: int) -> list[Step]:
        """Run all steps that start before `until_ps`, stretches of silent ones as one; an idle clock moves there."""
        done: list[Step] = []
        while self.clock_ps < until_ps and not self.idle:
            steps = self._stretch(until_ps)
            if steps > 1:
                self.pool.take(self._batch.growth(self.steps, steps))
                done.append(self._end(steps, self._silent_ps(steps), [], []))
            else:
                done.append(self.step())
        if self.idle:
            self.clock_ps = max(self.clock_ps, until_ps)
        return done

    def wake_ps(self) -> int | None:
        """The start of the next step that may show something; None when idle. All before it only decode."""
        if self.idle:
            return None
        return self.clock_ps + self._silent_ps(max(self._stretch(), 1) - 1)

    def silent_until(self, until_ps: int) -> int:
        """How many steps will have ended by then if nothing is submitted, as far as they only decode."""
        if until_ps <= self.clock_ps or not (limit := self._stretch()):
            return 0
        return min(limit, self._silent_steps(until_ps - self.clock_ps))

    def silent_end_ps(self, steps: int) -> int | None:
        """When the step after the next so many will have ended; None if it may do more than decode."""
        return self.clock_ps + self._silent_ps(steps + 1) if steps < self._stretch() else None

    def _stretch(self, until_ps: int | None = None) -> int:
        """Steps from here on that only decode: up to the first that finishes something, the last before `until_ps` or
        before memory ends; 0 if the next step may be of another kind."""
        if self._silent is None:
            self._silent = self._decode_only()
        steps = self._silent
        if until_ps is not None and self._silent_ps(max(steps - 1, 0)) >= until_ps - self.clock_ps:
            steps = self._silent_steps(until_ps - self.clock_ps - 1) + 1
        return steps

    def _decode_only(self) -> int:
        decodes = len(self._batch)
        if self._partial or not decodes or (self._waiting and not self._blocked):
            return 0
        steps, room = self._batch.next_end() - self.steps, self.pool.available
        if decodes * (steps // BLOCK_TOKENS + 1) > room and self._batch.growth(self.steps, steps) > room:
            steps = min(steps, BLOCK_TOKENS * (room // decodes))
        return steps

    def _silent_ps(self, steps: int) -> int:
        return self.profile.decoding_ps(steps, len(self._batch), self._batch.context_tokens)

    def _silent_steps(self, within_ps: int) -> int:
        return self.profile.decoding_steps(within_ps, len(self._batch), self._batch.context_tokens)

    def _make_room(self) -> list[Sequence]:
        """Take the blocks that the batch needs for one step; returns those who had to go for it."""
        preempted: list[Sequence] = []
        while (need := self._batch.growth(self.steps, 1)) > self.pool.available:
            preempted.append(self._preempt())
        self.pool.take(need)
        return preempted

    def _schedule(self, budget: int, preempted: list[Sequence]) -> list[tuple[Sequence, int]]:
        """The prompts that this step computes, with how many tokens of each, already counted as computed."""
        chunks: list[tuple[Sequence, int]] = []
        if sequence := self._partial:
            if q := self._compute(sequence, budget):
                chunks.append((sequence, q))
                budget -= q
            else:
                preempted.append(self._preempt())
        while budget and self._waiting and not preempted and not self._blocked:
            sequence = next(iter(self._waiting.values()))
            self._blocked = not self._admit(sequence, budget)
            if not self._blocked:
                q = self._compute(sequence, budget)
                chunks.append((sequence, q))
                budget -= q
        return chunks

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Move the head of the queue to the running, with what is cached of it, if its first chunk fits."""
        if len(self._running) >= self.max_seqs:
            return False
        table = _table(sequence)
        hit, pieces = table.lookup((sequence.target - 1) // BLOCK_TOKENS)
        if not table.fits(pieces, min(sequence.target, hit * BLOCK_TOKENS + budget)):
            return False
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        table.hold(pieces)
        sequence.computed = hit * BLOCK_TOKENS
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
            self.prefix_queries += sequence.prompt_tokens
            self.prefix_hits += sequence.cached_tokens
        return True

    def _compute(self, sequence: Sequence, budget: int) -> int:
        """Give a prompt its next tokens, at most `budget`; returns how many, 0 if there is no room for them."""
        q = min(sequence.target - sequence.computed, budget)
        if not _table(sequence).extend(sequence.computed + q):
            return 0
        sequence.computed += q
        self._partial = sequence if sequence.computed < sequence.target else None
        return q

    def _end(self, steps: int, duration_ps: int, complete: list[Sequence], preempted: list[Sequence]) -> Step:
        """Let the time of the steps pass. `complete`: prompts now computed."""
        start_ps, decodes, context = self.clock_ps, len(self._batch), self._batch.context_tokens
        self.clock_ps += duration_ps
        self.steps += steps
        self.generated_tokens += steps * decodes + len(complete)
        self._batch.move(steps)
        finished = [self._release(sequence) for sequence in self._batch.ended(self.steps)]
        first = [sequence for sequence in complete if not sequence.emitted]
        self.prompt_tokens += sum(sequence.prompt_tokens for sequence in first)
        for sequence in complete:
            sequence.emitted += 1
            if sequence.emitted == sequence.output_tokens:
                finished.append(self._release(sequence))
            else:
                self._batch.join(sequence, self.steps)
        self._blocked, self._silent = self._blocked and not finished, None
        shown = tuple(first), tuple(finished), tuple(preempted)
        return Step(steps, start_ps, self.clock_ps, decodes + len(complete), context, *shown)

    def _preempt(self) -> Sequence:
        """Take its blocks from the sequence admitted last, and put it at the head of the queue."""
        sequence = self._release(next(reversed(self._running.values())))
        sequence.preemptions += 1
        sequence.target = sequence.prompt_tokens + sequence.emitted
        self.preemptions += 1
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)
        self._blocked = False
        return sequence

    def _release(self, sequence: Sequence) -> Sequence:
        del self._running[sequence.id]
        table = _table(sequence)
        if sequence is self._partial:
            self._partial = None
        elif sequence.id in self._batch.members:
            table.adopt(self._batch.leave(sequence, self.steps))
        table.leave(sequence.computed)
        return sequence


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None, "the sequence was not submitted"
    return sequence.table
