"""The KV memory of an engine, and the prefix cache that lives in the part of it that nobody uses now.

Blocks are 16 tokens. A prompt is known by digests, each the chained hash of all up to the end of a *piece* of it (one
block, or 32 of them where a trace hashes 512 tokens at a time). As in vLLM's V1 cache: only full blocks are shared; a
lookup stops at the first that is missing; a block can be hit as soon as its computation is scheduled; a sequence frees
its blocks last first into one queue, so that of unused blocks the tail of a prompt is evicted before its head.

A piece may be present in part (its first blocks). Handling it whole gives the hits and evictions of single blocks,
because its blocks are always touched together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class Piece:
    """The first `blocks` blocks of one piece of a prompt, held by `holders` sequences. No key: not to be found."""

    __slots__ = ("blocks", "holders", "key")

    def __init__(self, key: Hashable | None, blocks: int = 0) -> None:
        self.key = key
        self.blocks = blocks
        self.holders = 1

    def __repr__(self) -> str:
        return f"<Piece {self.key!r}: {self.blocks} blocks, {self.holders} holders>"


class BlockPool:
    """`total` blocks, each free (not used since the start), idle (cached, may be evicted) or held."""

    __slots__ = ("_lru", "_pieces", "free", "idle", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.idle = 0
        self._pieces: dict[Hashable, Piece] = {}
        self._lru: OrderedDict[Piece, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BlockPool {self.held}/{self.total} held, {self.idle} idle in {len(self._lru)} pieces>"

    @property
    def held(self) -> int:
        return self.total - self.free - self.idle

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out."""
        return self.free + self.idle

    def find(self, key: Hashable) -> Piece | None:
        return self._pieces.get(key)

    def open(self, key: Hashable) -> Piece:
        """A new, empty piece held once. If the key is taken (a block computed twice) nobody will find this one."""
        if key in self._pieces:
            return Piece(None)
        piece = self._pieces[key] = Piece(key)
        return piece

    def take(self, blocks: int) -> None:
        """Hand out blocks, unused ones first, then the least recently used. The caller has looked at `available`."""
        if blocks <= self.free:
            self.free -= blocks
            return
        blocks -= self.free
        self.free = 0
        self.idle -= blocks
        while blocks:
            piece = next(iter(self._lru))
            gone = min(blocks, piece.blocks)
            piece.blocks -= gone
            blocks -= gone
            if not piece.blocks:
                del self._lru[piece]
                self._forget(piece)

    def hold(self, piece: Piece) -> None:
        if not piece.holders:
            del self._lru[piece]
            self.idle -= piece.blocks
        piece.holders += 1

    def leave(self, piece: Piece) -> None:
        """Give up one hold. After the last one the blocks may be evicted, as the most recently used."""
        piece.holders -= 1
        if piece.holders:
            return
        if piece.blocks:
            self._lru[piece] = None
            self.idle += piece.blocks
        else:
            self._forget(piece)

    def _forget(self, piece: Piece) -> None:
        if piece.key is not None:
            del self._pieces[piece.key]


class BlockTable:
    """The blocks of one sequence: those whose content has a digest in shared pieces, the rest its own."""

    __slots__ = ("_digests", "_filled", "_own", "_per", "_pieces", "_pool", "_salt", "_shared", "_tail", "held")

    def __init__(
        self, pool: BlockPool, digests: Sequence[Hashable], piece_tokens: int, tokens: int, salt: Hashable
    ) -> None:
        """`digests` stand for `piece_tokens` each, for `tokens` at most in all."""
        self._pool = pool
        self._digests = digests
        self._salt = salt
        self._per = piece_tokens // BLOCK_TOKENS
        self._shared = min(len(digests) * self._per, tokens // BLOCK_TOKENS)
        self._pieces: list[Piece] = []
        self._filled = 0  # leading blocks that are in pieces
        self._own = 0
        self._tail: Piece | None = None  # its own blocks, as a preemption left them in the cache
        self.held = 0

    def lookup(self, limit: int) -> tuple[int, list[Piece]]:
        """How many of the first `limit` blocks are present, and the pieces they are in. Touches nothing."""
        pieces: list[Piece] = []
        hit = 0
        for i in range(-(-min(limit, self._shared) // self._per)):
            piece = self._pool.find(self._key(i))
            if piece is None:
                break
            pieces.append(piece)
            hit += piece.blocks
            if hit < min((i + 1) * self._per, self._shared):
                break
        if self._tail and self._tail.blocks and hit == self._shared:
            pieces.append(self._tail)
            hit += self._tail.blocks
        return min(hit, limit), pieces

    def fits(self, pieces: list[Piece], tokens: int) -> bool:
        """Whether these pieces can be held and the rest of `tokens` found."""
        idle = sum(piece.blocks for piece in pieces if not piece.holders)
        present = sum(piece.blocks for piece in pieces)
        return blocks_for(tokens) - present <= self._pool.available - idle

    def hold(self, pieces: list[Piece]) -> None:
        """Begin with what `lookup` found."""
        for piece in pieces:
            self._pool.hold(piece)
        self.held = sum(piece.blocks for piece in pieces)
        self._own = 0
        if self._tail and pieces and pieces[-1] is self._tail:
            self._own = self._tail.blocks
            pieces.pop()
        self._tail = None
        self._pieces = pieces
        self._filled = self.held - self._own

    def extend(self, tokens: int) -> bool:
        """Take the blocks that `tokens` computed tokens need and share those that are full; False if there are none."""
        need = max(blocks_for(tokens) - self.held, 0)
        if need > self._pool.available:
            return False
        self._pool.take(need)
        self.adopt(need)
        self.fill(tokens)
        return True

    def adopt(self, blocks: int) -> None:
        """Count blocks as this sequence's own that were taken for it before."""
        self._own += blocks
        self.held += blocks

    def fill(self, tokens: int) -> None:
        """The first `tokens` are computed: blocks among them that have a digest can be found from now on."""
        full = min(tokens // BLOCK_TOKENS, self._shared)
        if full <= self._filled:
            return
        for i in range(self._filled // self._per, -(-full // self._per)):
            if i == len(self._pieces):
                self._pieces.append(self._pool.open(self._key(i)))
            piece = self._pieces[i]
            grown = max(min(full - i * self._per, self._per) - piece.blocks, 0)
            piece.blocks += grown
            self._own -= grown
        self._filled = full

    def leave(self, tokens: int) -> None:
        """Give all blocks back, last first, of which `tokens` are computed; they stay cached while there is room."""
        self.fill(tokens)
        full = max(tokens // BLOCK_TOKENS - self._filled, 0)
        self._tail = Piece(None, full)
        self._pool.leave(Piece(None, self._own - full))
        self._pool.leave(self._tail)
        for piece in reversed(self._pieces):
            self._pool.leave(piece)
        self._pieces = []
        self._filled = self._own = self.held = 0

    def _key(self, i: int) -> Hashable:
        return self._digests[i] if self._salt is None else (self._salt, self._digests[i])
