"""What the emulated model answers to an Ask: how long, which words, how it ends; and what that costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from loadtests import prose
from loadtests.asks import END_OF_TURN, Ask, Json

# An answer that nobody limited ends by itself, at a length drawn for its prompt; at least this long.
SHORTEST = 4
# How far into an answer its blocks are known by content, so that the next turn finds them cached.
DIGESTED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Speech:
    """One choice: `length` tokens of `tokens` from `start` on. One that stops ends in an empty token."""

    tokens: Sequence[str]
    start: int
    length: int
    finish: str  # stop, length or tool_calls

    def token(self, k: int) -> str:
        """The k-th token's text, from 0 on."""
        if k == self.length - 1 and self.finish != "length":
            return ""
        return self.tokens[(self.start + k) % len(self.tokens)]

    def text(self) -> str:
        return "".join(self.token(k) for k in range(self.length))

    def rendered(self, most: int) -> bytes:
        """The first `most` tokens as they stand in the next turn's prompt."""
        words = (self.token(k).encode() or END_OF_TURN for k in range(min(self.length, most)))
        return b"".join(map(prose.padded, words))


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request. `cached` of the prompts were found in the prefix cache, `created` put into it."""

    prompt: int = 0
    output: int = 0
    cached: int = 0
    created: int = 0

    def chat(self) -> Json:
        """As chat and completions report it."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.output,
            "completion_tokens": self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached, "created_cache_tokens": self.created},
        }


@dataclass(frozen=True, slots=True)
class Speaker:
    """The model: the corpus that it quotes, its seed, the mean length of its answers and the most it can hold."""

    corpus: prose.Corpus
    seed: int
    mean_tokens: float
    max_len: int

    def answer(self, ask: Ask, prompt: bytes, choice: int) -> Speech:
        """The same prompt, seeds and choice give the same answer."""
        rng = Random(xxhash.xxh3_64_intdigest(prompt, self.seed & 0xFFFFFFFF) + 1_000_003 * ask.seed + choice)
        if ask.tool is not None:
            pieces = prose.pieces(example(ask.tool[1], rng, self.corpus))
            return limited(pieces, 0, len(pieces) + 1, ask.max_tokens, "tool_calls")
        natural = max(ask.min_tokens, SHORTEST) + int(rng.expovariate(1 / self.mean_tokens))
        most = self.max_len - prose.token_count(prompt)
        if ask.max_tokens is not None:
            most = min(most, ask.max_tokens)
        return limited(
            self.corpus.tokens, rng.randrange(len(self.corpus)), most + 1 if ask.ignore_eos else natural, most, "stop"
        )


def limited(tokens: Sequence[str], start: int, length: int, most: int | None, finish: str) -> Speech:
    """A speech of `length`, cut to `most`."""
    if most is not None and length > most:
        return Speech(tokens, start, most, "length")
    return Speech(tokens, start, length, finish)


def example(schema: Json, rng: Random, corpus: prose.Corpus) -> object:
    """A value that a JSON schema allows, as far as its types, enumerations and required properties say."""
    if options := schema.get("enum"):
        return rng.choice(options)
    kind = schema.get("type", "object" if "properties" in schema else None)
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = schema.get("properties", {})
            wanted = schema.get("required", list(properties))
            return {name: example(properties.get(name, {}), rng, corpus) for name in wanted}
        case "array":
            return [example(schema.get("items", {}), rng, corpus)]
        case "integer" | "number":
            return rng.randrange(1, 100)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case None:
            return {}
        case _:
            return "".join(corpus.excerpt(rng.randrange(len(corpus)), 3)).strip()
