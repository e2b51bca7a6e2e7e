"""What an engine works on: sequences, and the batch of those that decode, kept as sums."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Digests
from dataclasses import dataclass
from heapq import heappop, heappush

from loadtests.kvcache import BLOCK_TOKENS, BlockPool, BlockTable, blocks_for


@dataclass(slots=True, eq=False)
class Sequence:
    """One request to an engine. The caller sets the fields up to `salt`, the engine all others.

    `digests[i]` is the chained hash of the first (i + 1) x `digest_tokens` tokens. They cover the prompt (the last may
    stand for less than a whole piece), or `digested_tokens` when they go on into the answer, whose blocks are then
    cached when the sequence ends. Sequences of different `salt` share nothing.
    """

    id: Hashable
    prompt_tokens: int
    output_tokens: int
    digests: Digests[Hashable] = ()
    digest_tokens: int = BLOCK_TOKENS
    digested_tokens: int | None = None
    salt: Hashable = None
    cached_tokens: int = 0  # of the prompt, found when it was first scheduled
    preemptions: int = 0
    table: BlockTable | None = None
    target: int = 0  # tokens to compute before the next one comes out: prompt + emitted
    computed: int = 0  # while decoding: when it began to
    emitted: int = 0  # likewise
    born: int = 0  # the engine's step count when it began to decode

    @property
    def last_step(self) -> int:
        """The engine's step count when its last token is out, for one that decodes."""
        return self.born + self.output_tokens - self.emitted

    def blocks(self, pool: BlockPool) -> BlockTable:
        """A block table for it that holds nothing yet."""
        tokens = self.prompt_tokens if self.digested_tokens is None else self.digested_tokens
        return BlockTable(pool, self.digests, self.digest_tokens, tokens, self.salt)


class Batch:
    """The sequences that decode. Its sums move by one call per step or per many steps; its size costs nothing."""

    __slots__ = ("_ends", "_phases", "_ties", "context_tokens", "members")

    def __init__(self) -> None:
        self.members: dict[Hashable, Sequence] = {}
        self.context_tokens = 0  # computed tokens of all members
        self._phases = [0] * BLOCK_TOKENS  # members that come to need a block in step i (mod 16)
        self._ends: list[tuple[int, int, Sequence]] = []  # (last step, tie, sequence), some of them stale
        self._ties = 0

    def __len__(self) -> int:
        return len(self.members)

    def join(self, sequence: Sequence, step: int) -> None:
        sequence.born = step
        self.members[sequence.id] = sequence
        self.context_tokens += sequence.computed
        self._phases[(step - sequence.computed) % BLOCK_TOKENS] += 1
        self._ties += 1
        heappush(self._ends, (sequence.last_step, self._ties, sequence))

    def leave(self, sequence: Sequence, step: int) -> int:
        """Take it out, its counts brought up to date; returns the blocks that it came to need as a member."""
        del self.members[sequence.id]
        self._phases[(sequence.born - sequence.computed) % BLOCK_TOKENS] -= 1
        before = blocks_for(sequence.computed)
        gained = step - sequence.born
        sequence.emitted += gained
        sequence.computed += gained
        self.context_tokens -= sequence.computed
        return blocks_for(sequence.computed) - before

    def move(self, steps: int) -> None:
        """Each member gains a token in each of so many steps."""
        self.context_tokens += steps * len(self.members)

    def growth(self, step: int, steps: int) -> int:
        """Blocks that the members come to need in so many steps after `step`."""
        cycles, rest = divmod(steps, BLOCK_TOKENS)
        return cycles * len(self.members) + sum(self._phases[(step + i) % BLOCK_TOKENS] for i in range(rest))

    def next_end(self) -> int:
        """The step count at which the first member has all its tokens. There must be a member."""
        while self._stale(self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0]

    def ended(self, step: int) -> Iterator[Sequence]:
        """Members that have all their tokens at `step`; the caller makes each leave before it asks for the next."""
        while self._ends and self._ends[0][0] <= step:
            entry = heappop(self._ends)
            if not self._stale(entry):
                yield entry[2]

    def _stale(self, entry: tuple[int, int, Sequence]) -> bool:
        step, _, sequence = entry
        return self.members.get(sequence.id) is not sequence or sequence.last_step != step
