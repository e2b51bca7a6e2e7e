"""Compressed bodies come out plain, however they are cut; what is damaged or a bomb is told so, and nothing else."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.inflate import MAX_GROWTH, Damaged, Inflater, inflater

PACKED = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "raw": lambda data: flushed(data, -zlib.MAX_WBITS),
    "flushed": lambda data: flushed(data, zlib.MAX_WBITS | 16),
    "stored": lambda data: gzip.compress(data, 0),
}
GZIPPED = ["gzip", "flushed", "stored"]


def flushed(data: bytes, wbits: int) -> bytes:
    """As a server does that flushes after each event."""
    packer = zlib.compressobj(wbits=wbits)
    pieces = (data[start : start + 9] for start in range(0, len(data), 9))
    return b"".join(packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) for piece in pieces) + packer.flush()


def undo(packed: bytes, cuts: list[int], how: str = "gzip") -> bytes:
    """What comes out of bytes cut at these offsets."""
    each, bounds = Inflater(gzip=how in GZIPPED), sorted({cut % (len(packed) + 1) for cut in cuts} | {0, len(packed)})
    return b"".join(each.feed(packed[start:end]) for start, end in pairwise(bounds)) + each.end()


BODIES = st.lists(st.binary(max_size=200), min_size=1, max_size=3)


@given(BODIES, st.sampled_from(GZIPPED), st.lists(st.integers(0)))
@example([b"", b"x"], "gzip", [])
def test_any_members_cut_anywhere_come_out(bodies: list[bytes], how: str, cuts: list[int]) -> None:
    """One member or several, cut at any byte: the same plain bytes."""
    assert undo(b"".join(map(PACKED[how], bodies)), cuts, how) == b"".join(bodies)


@given(st.binary(max_size=200), st.sampled_from(list(PACKED)), st.lists(st.integers(0)))
def test_any_body_cut_anywhere_comes_out(body: bytes, how: str, cuts: list[int]) -> None:
    """gzip, and deflate with its wrapper or without."""
    assert undo(PACKED[how](body), cuts, how) == body


@given(st.binary(min_size=1, max_size=200), st.sampled_from(["gzip", "zlib", "flushed", "stored"]), st.data())
def test_a_body_that_breaks_off_is_damaged(body: bytes, how: str, data: st.DataObject) -> None:
    """Every proper beginning of two bytes and more, and what comes out of it is a beginning."""
    packed = PACKED[how](body)
    cut = data.draw(st.integers(2, len(packed) - 1))
    each = Inflater(gzip=how in GZIPPED)
    assert body.startswith(each.feed(packed[:cut]))
    with pytest.raises(Damaged):
        each.end()


@given(st.binary(max_size=200), st.lists(st.integers(0)), st.sampled_from(["gzip", "zlib"]))
@example(b'{"error":1}', [3], "gzip")
@example(b"\x1f\x8b not gzip", [], "gzip")
@example(gzip.compress(b"x" * 50)[:20] + b"\xff" * 20, [], "gzip")
def test_any_bytes_come_out_or_are_damaged(data: bytes, cuts: list[int], how: str) -> None:
    """Never another exception."""
    with suppress(Damaged):
        undo(data, cuts, how)


@pytest.mark.parametrize("body", [b'{"a":1}', b"data: x\n\n", b"<html>", b"", b"x"])
def test_what_only_claims_an_encoding_passes(body: bytes) -> None:
    """As it is, in one piece or in many."""
    for size in (1, 2, 3, 100):
        assert undo(body, list(range(0, len(body), size)), "gzip") == body


def test_events_come_out_with_the_flush_that_ends_them() -> None:
    """Nothing is held back behind a sync flush."""
    packer, each = zlib.compressobj(wbits=zlib.MAX_WBITS | 16), Inflater(gzip=True)
    for number in range(20):
        event = b"data: %d\n\n" % number
        assert each.feed(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)) == event


@pytest.mark.parametrize("members", [1, 40])
def test_a_bomb_is_refused_before_it_grows(members: int) -> None:
    """Above the bound for one piece, in one member or in many that are each below it."""
    bomb = gzip.compress(bytes(8 * MAX_GROWTH // members)) * members
    with pytest.raises(Damaged, match="beyond measure"):
        Inflater(gzip=True).feed(bomb)


@pytest.mark.parametrize("encoding", [b"gzip", b" GZIP ", b"x-gzip", b"deflate"])
def test_the_encodings_that_are_undone(encoding: bytes) -> None:
    """gzip and deflate, in any case."""
    assert inflater(encoding) is not None


@pytest.mark.parametrize("encoding", [b"identity", b"br", b"zstd", b"gzip, gzip", b""])
def test_other_encodings_are_the_clients_to_undo(encoding: bytes) -> None:
    """They pass."""
    assert inflater(encoding) is None
