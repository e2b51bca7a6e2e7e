"""What the emulated model reads and says. A token is four bytes, so that counting, caching and answering agree.

A prompt is rendered as an engine's chat template would: every part begins and ends on a token, and the answer stands
in the next turn's prompt where it stood when it was generated, so that a conversation finds itself in the prefix cache.

The answer is pseudo-English of words that are whole tokens with their leading space (three, seven or eleven letters),
a fixed text of which each answer is an excerpt; where it starts comes from the seed and the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import xxhash

TOKEN_BYTES = 4
BLOCK_TOKENS = 16
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS
# An image costs this many tokens, whatever its size, about what a vision tower of 336 pixels yields.
IMAGE_TOKENS = 256
SENTENCES = 512
NOUNS = "dam ice oil sea sun air channel turbine current torrent cascade fissure sluices conduit"
VERBS = "fed cut met ran won propels filters carries gathers divides follows reaches"
ADJECTIVES = "old dry new hot raw shallow distant turning patient quieter neutral underground"
ENDINGS = ("in", "on", "up", "by", "so")


def padded(text: bytes) -> bytes:
    """`text` filled up to whole tokens."""
    return text + b"\0" * (-len(text) % TOKEN_BYTES)


def token_count(rendered: bytes) -> int:
    return -(-len(rendered) // TOKEN_BYTES)


def token_ids(rendered: bytes) -> list[int]:
    """Each token as the number that its bytes are, so that `text_of` needs no table."""
    return [int.from_bytes(rendered[i : i + TOKEN_BYTES], "big") for i in range(0, len(rendered), TOKEN_BYTES)]


def text_of(ids: Sequence[int]) -> str:
    """The inverse of `token_ids`. Raises OverflowError for a number that is no token."""
    raw = b"".join(number.to_bytes(TOKEN_BYTES, "big") for number in ids)
    return raw.replace(b"\0", b"").decode("utf-8", "replace")


def image(url: str) -> bytes:
    """An image as IMAGE_TOKENS tokens that depend on all of it."""
    digest = xxhash.xxh3_128_hexdigest(url.encode()).encode()
    return digest * (IMAGE_TOKENS * TOKEN_BYTES // len(digest))


def digests(rendered: bytes) -> list[int]:
    """A chained hash for every full block, each standing for all up to its end."""
    found: list[int] = []
    chain = xxhash.xxh3_128()
    for end in range(BLOCK_BYTES, len(rendered) + 1, BLOCK_BYTES):
        chain.update(rendered[end - BLOCK_BYTES : end])
        found.append(chain.intdigest())
    return found


class Corpus:
    """The text that answers are excerpts of, as tokens; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        nouns, verbs, adjectives = NOUNS.split(), VERBS.split(), ADJECTIVES.split()
        lines = []
        for _ in range(SENTENCES):
            subject, thing = rng.sample(nouns, 2)
            words = f" The {rng.choice(adjectives)} {subject} {rng.choice(verbs)} the {thing} {rng.choice(ENDINGS)}."
            lines.append(words)
        text = "".join(lines)
        self.tokens = [text[i : i + TOKEN_BYTES] for i in range(0, len(text), TOKEN_BYTES)]

    def __len__(self) -> int:
        return len(self.tokens)

    def excerpt(self, start: int, length: int) -> list[str]:
        """`length` tokens from `start` on, round and round."""
        size = len(self.tokens)
        return [self.tokens[(start + i) % size] for i in range(length)]


def pieces(value: object) -> list[str]:
    """A JSON document in pieces of a token, as a model would write the arguments of a tool call."""
    text = json.dumps(value)
    return [text[i : i + TOKEN_BYTES] for i in range(0, len(text), TOKEN_BYTES)]
