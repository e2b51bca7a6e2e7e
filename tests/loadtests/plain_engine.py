"""The engine model once more, the slow and obvious way, block by block: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from loadtests.engine import Sequence
from loadtests.profiles import Profile

BLOCK = 16


@dataclass(eq=False)
class Block:
    key: Hashable | None = None
    holders: int = 0


@dataclass(eq=False)
class Plain:
    """One sequence: `at` tokens computed of `target`, `out` emitted."""

    request: Sequence
    target: int
    at: int = 0
    out: int = 0
    blocks: list[Block] = field(default_factory=list)
    cached: int | None = None
    decodes: bool = False

    def key(self, i: int) -> Hashable:
        """Blocks with a digest are shared; all others can only be found by the sequence itself."""
        per = self.request.digest_tokens // BLOCK
        if i < min(len(self.request.digests) * per, self.request.prompt_tokens // BLOCK):
            return (self.request.salt, self.request.digests[i // per], i % per)
        return (self.request.id, i)


class PlainEngine:
    def __init__(self, profile: Profile, chunk: int, blocks: int, max_seqs: int) -> None:
        self.profile, self.chunk, self.max_seqs = profile, chunk, max_seqs
        self.clock_ps = 0
        self.queue = [Block() for _ in range(blocks)]  # blocks that nobody holds, least recently used first
        self.cache: dict[Hashable, Block] = {}
        self.waiting: list[Plain] = []
        self.running: list[Plain] = []

    def submit(self, request: Sequence) -> None:
        self.waiting.append(Plain(request, request.prompt_tokens))

    def cancel(self, name: Hashable) -> None:
        for plain in [plain for plain in self.running if plain.request.id == name]:
            self.free(plain)
        self.waiting = [plain for plain in self.waiting if plain.request.id != name]

    def step(self) -> tuple[int, list[Hashable], list[Hashable], list[Hashable]]:
        """Duration in ps; the ids that had their first token, ended, were preempted."""
        preempted: list[Hashable] = []
        scheduled: list[tuple[Plain, int]] = []
        budget = self.chunk
        decoding = [plain for plain in self.running if plain.decodes]
        for plain in [*decoding, *[plain for plain in self.running if plain not in decoding]]:
            q = min(plain.target - plain.at, budget)
            while plain in self.running and not self.allocate(plain, q):
                last = self.running[-1]
                scheduled = [(other, n) for other, n in scheduled if other is not last]
                preempted.append(last.request.id)
                self.preempt(last)
            if plain in self.running and q:
                scheduled.append((plain, q))
                budget -= q
        while self.waiting and budget and not preempted and len(self.running) < self.max_seqs:
            plain = self.waiting[0]
            q = self.admit(plain, budget)
            if not q:
                break
            scheduled.append((plain, q))
            budget -= q
        return (*self.end(scheduled, decoding), preempted)

    def end(
        self, scheduled: list[tuple[Plain, int]], decoding: list[Plain]
    ) -> tuple[int, list[Hashable], list[Hashable]]:
        decodes = [plain for plain, _ in scheduled if plain in decoding]
        prefills = [(plain, q) for plain, q in scheduled if plain not in decoding]
        pairs = sum(q * (2 * plain.at + q) for plain, q in prefills)
        duration = self.profile.step_ps(
            len(decodes), sum(plain.at for plain in decodes), len(prefills), sum(q for _, q in prefills), pairs
        )
        self.clock_ps += duration
        first, finished = [], []
        for plain, q in scheduled:
            plain.at += q
            if plain.at == plain.target:
                plain.out += 1
                plain.target += 1
                plain.decodes = True
                if plain.out == 1:
                    first.append(plain.request.id)
                if plain.out == plain.request.output_tokens:
                    finished.append(plain)
        for plain in [p for p in finished if p in decodes] + [p for p in finished if p not in decodes]:
            self.free(plain)
        return duration, first, [plain.request.id for plain in finished]

    def hits(self, plain: Plain) -> list[Block]:
        found = []
        for i in range((plain.target - 1) // BLOCK):
            block = self.cache.get(plain.key(i))
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, plain: Plain, budget: int) -> int:
        hits = self.hits(plain)
        at = len(hits) * BLOCK
        q = min(plain.target - at, budget)
        idle = sum(not block.holders for block in hits)
        if -(-(at + q) // BLOCK) - len(hits) > len(self.queue) - idle:
            return 0
        for block in hits:
            if not block.holders:
                self.queue.remove(block)
            block.holders += 1
        plain.blocks, plain.at = hits, at
        plain.cached = at if plain.cached is None else plain.cached
        self.waiting.pop(0)
        self.running.append(plain)
        assert self.allocate(plain, q)
        return q

    def allocate(self, plain: Plain, q: int) -> bool:
        need = -(-(plain.at + q) // BLOCK) - len(plain.blocks)
        if need > len(self.queue):
            return False
        for _ in range(need):
            block = self.queue.pop(0)
            if block.key is not None and self.cache.get(block.key) is block:
                del self.cache[block.key]
            block.key, block.holders = None, 1
            plain.blocks.append(block)
        for i in range((plain.at + q) // BLOCK):
            if plain.blocks[i].key is None:
                plain.blocks[i].key = plain.key(i)
                self.cache.setdefault(plain.key(i), plain.blocks[i])
        return True

    def free(self, plain: Plain) -> None:
        for block in reversed(plain.blocks):
            block.holders -= 1
            if not block.holders:
                self.queue.append(block)
        plain.blocks = []
        self.running.remove(plain)

    def preempt(self, plain: Plain) -> None:
        self.free(plain)
        plain.decodes = False
        self.waiting.insert(0, plain)
