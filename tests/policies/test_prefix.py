"""The index of cached prefixes against a model that keeps every backend's pieces in a plain list, and searches it."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.prefix import PIECE_BYTES, PrefixIndex, digests, favourite, namespace

BACKENDS = st.sampled_from(["a", "b", "c"])
# Few families that branch, so that prompts share beginnings; a digest stands for all that came before it.
PROMPTS = st.lists(st.integers(0, 1), max_size=6).map(
    lambda way: tuple(bytes(way[: length + 1]) for length in range(len(way)))
)


class Model:
    """The same promises, slowly: the pieces of each backend from the one touched longest ago to the last."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[bytes]] = {}
        self.capacity: dict[str, int] = {}

    def resize(self, backend: str, pieces: int) -> None:
        self.capacity[backend] = pieces
        self.pieces.setdefault(backend, [])
        self._evict(backend)

    def insert(self, prefix: Sequence[bytes], backend: str) -> None:
        if backend in self.pieces:
            touched = prefix[: self.capacity[backend]]
            kept = [piece for piece in self.pieces[backend] if piece not in touched]
            self.pieces[backend] = [*kept, *reversed(touched)]
            self._evict(backend)

    def remove(self, prefix: Sequence[bytes], backend: str) -> None:
        if backend in self.pieces:
            self.pieces[backend] = [piece for piece in self.pieces[backend] if piece not in prefix]

    def match(self, prefix: Sequence[bytes], backend: str) -> int:
        held = [piece in self.pieces[backend] for piece in prefix]
        return [*held, False].index(False)

    def whole(self, backend: str) -> bool:
        """Whether each piece there has all that come before it. `remove` may leave some that have not, which are found
        again once what comes before them is inserted anew."""
        return all(piece[:-1] in ([b""] + self.pieces[backend]) for piece in self.pieces[backend])

    def _evict(self, backend: str) -> None:
        self.pieces[backend] = self.pieces[backend][max(0, len(self.pieces[backend]) - self.capacity[backend]) :]


class IndexMachine(RuleBasedStateMachine):
    """Any history of both."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.model = PrefixIndex(), Model()

    @rule(backend=BACKENDS, pieces=st.integers(0, 12))
    def resize(self, backend: str, pieces: int) -> None:
        self.index.resize(backend, pieces)
        self.model.resize(backend, pieces)

    @rule(backend=BACKENDS)
    def forget(self, backend: str) -> None:
        self.index.forget(backend)
        self.model.pieces.pop(backend, None)

    @rule(prompt=PROMPTS, backend=BACKENDS)
    def insert(self, prompt: tuple[bytes, ...], backend: str) -> None:
        self.index.insert(prompt, backend)
        self.model.insert(prompt, backend)

    @rule(prompt=PROMPTS, backend=BACKENDS)
    def remove(self, prompt: tuple[bytes, ...], backend: str) -> None:
        self.index.remove(prompt, backend)
        self.model.remove(prompt, backend)

    @rule(prompt=PROMPTS)
    def match(self, prompt: tuple[bytes, ...]) -> None:
        common, more = self.index.match(prompt)
        found = {name: more.get(name, common) for name in self.model.pieces}
        for name, length in found.items():
            exact = self.model.match(prompt, name)
            assert length == exact or (length > exact and not self.model.whole(name)), name
        assert more.keys() <= found.keys()
        assert all(length > common for length in more.values())

    @rule(prompt=PROMPTS, backend=BACKENDS)
    def a_change_is_told_by_the_version(self, prompt: tuple[bytes, ...], backend: str) -> None:
        version, before = self.index.version, self.index.match(prompt)
        self.insert(prompt, backend)
        assert self.index.match(prompt) == before or self.index.version != version

    @invariant()
    def holds_no_more_than_it_should(self) -> None:
        assert len(self.index) == sum(map(len, self.model.pieces.values()))
        held = {piece for pieces in self.model.pieces.values() for piece in pieces}
        assert self.index._holders.keys() == held


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    """What is left of an evicted prompt is its beginning, as in an engine's cache."""
    index = PrefixIndex()
    index.resize("a", 4)
    index.insert((b"p1", b"p2", b"p3"), "a")
    index.insert((b"q1", b"q2"), "a")
    assert index.match((b"p1", b"p2", b"p3")) == (2, {})
    assert index.match((b"q1", b"q2")) == (2, {})


@pytest.mark.parametrize("cut", [1, 100, PIECE_BYTES, PIECE_BYTES + 1, 5000])
def test_digests_are_of_whole_pieces_however_the_bytes_come(cut: int) -> None:
    """One for each whole KiB of all that came until then, no matter how it was split; they differ by the seed."""
    text = bytes(i * 7 % 251 for i in range(4 * PIECE_BYTES + 500))
    whole = digests([text], 1)
    assert len(set(whole)) == len(whole) == 4
    assert digests([text[i : i + cut] for i in range(0, len(text), cut)], 1) == whole
    assert digests([text[: 2 * PIECE_BYTES] + bytes(3 * PIECE_BYTES)], 1)[:2] == whole[:2]
    assert not set(digests([text], 2)) & set(whole)
    assert digests([text], 1, limit=3) == whole[:3]
    assert digests([text[: 2 * PIECE_BYTES]], 1) == whole[:2]


def test_namespaces_differ_in_every_part() -> None:
    """Also where the parts joined would be the same text."""
    parts = [(b"s", "ab", "c", "d"), (b"s", "a", "bc", "d"), (b"s", "ab", "", "cd"), (b"t", "ab", "c", "d")]
    assert len({namespace(*each) for each in parts}) == len(parts)


def test_a_name_that_goes_moves_only_its_own_keys() -> None:
    """Rendezvous hashing: the others stay where they were, and the keys spread over all."""
    keys = [b"key %d" % i for i in range(300)]
    names = ["a", "b", "c"]
    before = {key: favourite(key, names) for key in keys}
    after = {key: favourite(key, names[:2]) for key in keys}
    assert all(after[key] == name for key, name in before.items() if name != "c")
    assert min(list(before.values()).count(name) for name in names) > 60
