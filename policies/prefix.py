"""Which backend holds which prompts: keyed digests of leading pieces, a bounded index of them, and a placement
that every replica computes alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import xxhash

PIECE_BYTES = 1024


def namespace(secret: bytes, model: str, adapter: str, trust_group: str) -> int:
    """The seed of one namespace of digests: who lacks `secret` can neither compute nor collide with its digests.

    The fields are length-prefixed, so that no two triples make the same input. Returns 64 bits.
    """
    mac = blake2b(digest_size=8, key=secret[:64], person=b"hr-prefix")
    for text in (model, adapter, trust_group):
        raw = text.encode()
        mac.update(len(raw).to_bytes(8, "big") + raw)
    return int.from_bytes(mac.digest(), "big")


def digests(pieces: Iterable[bytes | memoryview], seed: int, limit: int = 4096) -> tuple[bytes, ...]:
    """One digest of 16 bytes at each whole KiB of the joined `pieces`, of all that came before it, shortest first.

    Two prompts share their first digests exactly as far as they share their first KiBs. At most `limit` digests
    (4 MiB of prompt) are made.
    """
    state = xxhash.xxh3_128(seed=seed)
    update, digest = state.update, state.digest
    found: list[bytes] = []
    room = PIECE_BYTES
    for piece in pieces:
        view = memoryview(piece)
        start = 0
        while len(view) - start >= room:
            update(view[start : start + room])
            found.append(digest())
            if len(found) >= limit:
                return tuple(found)
            start += room
            room = PIECE_BYTES
        update(view[start:])
        room -= len(view) - start
    return tuple(found)


def favourite(key: bytes, names: Sequence[str]) -> str:
    """The name that `key` belongs to by rendezvous hashing (Thaler & Ravishankar 1998).

    Whoever has the same names agrees without talking; a name that comes or goes moves only its own keys.
    """
    return max(names, key=lambda name: (xxhash.xxh3_64_intdigest(key + name.encode()), name))


class PrefixIndex:
    """Which pieces each backend's prefix cache holds, as far as own dispatches tell. No tokens, only digests.

    Each backend's pieces are an LRU of `capacity` pieces, the size of the cache that it mirrors. A prompt is touched
    from its tail to its head, as engines free its blocks: so the tail goes first, and what a backend holds of a
    prompt is always a leading part. Matching is a search for the ends of those parts, O(ends x log(pieces)).

    Memory is bounded by the capacities: BYTES_PER_PIECE for each piece on each backend, measured.
    """

    BYTES_PER_PIECE = 400

    def __init__(self) -> None:
        self._recent: dict[str, OrderedDict[bytes, None]] = {}
        self._capacity: dict[str, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._holders: dict[bytes, int] = {}
        self._everyone = 0
        self.version = 0

    def __len__(self) -> int:
        return sum(map(len, self._recent.values()))

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {len(recent)}/{self._capacity[name]}" for name, recent in self._recent.items())
        return f"<PrefixIndex [{held}]>"

    def resize(self, backend: str, pieces: int) -> None:
        """Let `backend` hold at most so many pieces; a new backend starts empty."""
        if backend not in self._bits:
            bit = 1
            while bit in self._names:
                bit <<= 1
            self._bits[backend], self._names[bit] = bit, backend
            self._recent[backend] = OrderedDict()
            self._everyone |= bit
            self.version += 1
        self._capacity[backend] = pieces
        self._evict(backend)

    def forget(self, backend: str) -> None:
        """The backend's cache is gone, and so is the backend until the next `resize`."""
        if backend in self._bits:
            self._capacity[backend] = 0
            self._evict(backend)
            bit = self._bits.pop(backend)
            self._everyone ^= bit
            del self._recent[backend], self._capacity[backend], self._names[bit]
            self.version += 1

    def insert(self, prefix: Sequence[bytes], backend: str) -> None:
        """The prompt goes to `backend` now, and will be in its cache. Names that were not sized are ignored."""
        recent = self._recent.get(backend)
        if recent is None or not prefix:
            return
        bit = self._bits[backend]
        holders = self._holders
        touch = recent.move_to_end
        for digest in reversed(prefix[: self._capacity[backend]]):
            if digest in recent:
                touch(digest)
            else:
                recent[digest] = None
                holders[digest] = holders.get(digest, 0) | bit
        self.version += 1
        self._evict(backend)

    def remove(self, prefix: Sequence[bytes], backend: str) -> None:
        """The prompt is not in `backend`'s cache, it has turned out. What began alike is not found there either, until
        something that does is inserted anew."""
        recent = self._recent.get(backend)
        if recent is None:
            return
        bit = self._bits[backend]
        for digest in prefix:
            if digest in recent:
                del recent[digest]
                self._unhold(digest, bit)
        self.version += 1

    def match(self, prefix: Sequence[bytes]) -> tuple[int, dict[str, int]]:
        """How many leading pieces of the prompt every backend holds, and the counts of those that hold more."""
        common, more = 0, {}
        holders, ends = self._holders.get, len(prefix)
        start, mask = 0, holders(prefix[0], 0) if prefix else 0
        everyone = mask == self._everyone
        while mask:  # all in `mask` hold prefix[start]: find the last piece that all of them hold
            low, high = start, ends
            while high - low > 1:
                middle = (low + high) // 2
                if holders(prefix[middle], 0) & mask == mask:
                    low = middle
                else:
                    high = middle
            start = low + 1
            beyond = holders(prefix[start], 0) & mask if start < ends else 0
            if everyone and not common:
                common = start
            else:
                for name in self._backends(mask & ~beyond):
                    more[name] = start
            mask = beyond
        return common, more

    def _backends(self, mask: int) -> Iterator[str]:
        while mask:
            bit = mask & -mask
            yield self._names[bit]
            mask ^= bit

    def _evict(self, backend: str) -> None:
        recent, bit = self._recent[backend], self._bits[backend]
        surplus = len(recent) - self._capacity[backend]
        for _ in range(surplus):
            self._unhold(recent.popitem(last=False)[0], bit)
        if surplus > 0:
            self.version += 1

    def _unhold(self, digest: bytes, bit: int) -> None:
        holders = self._holders
        if left := holders[digest] & ~bit:
            holders[digest] = left
        else:
            del holders[digest]
