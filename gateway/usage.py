"""Token counts as engines report them, in the shapes of all dialects."""

from __future__ import annotations

import json
import re
from typing import Annotated

import msgspec

USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**48)]

_raw_decode = json.JSONDecoder().raw_decode


class Counts(msgspec.Struct, frozen=True, gc=False):
    """Tokens as one event reports them; None is what it does not say. `prompt` includes what was cached."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None

    def over(self, earlier: Counts | None) -> Counts:
        """Usage is cumulative: the later report wins, the earlier one fills what it leaves out."""
        if earlier is None:
            return self
        return Counts(
            earlier.prompt if self.prompt is None else self.prompt,
            earlier.output if self.output is None else self.output,
            earlier.cached if self.cached is None else self.cached,
        )


def counts_in(usage: object) -> Counts | None:
    """None unless at least one whole number of tokens is reported."""
    if not usage:
        return None
    try:
        counts = msgspec.convert(usage, _Usage).counts()
    except msgspec.ValidationError:
        return None
    return None if counts == Counts() else counts


def last_counts(data: bytes) -> Counts | None:
    """The last usage object in a piece of JSON. A property of a tool may have that name too: try a few."""
    for match in list(USAGE.finditer(data))[:-5:-1]:
        try:
            usage, _ = _raw_decode(data[match.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if counts := counts_in(usage):
            return counts
    return None


class _Details(msgspec.Struct):
    cached_tokens: Whole | None = None


class _Usage(msgspec.Struct):
    """The usage objects of all dialects in one. Anthropic's `input_tokens` leave out what the cache took part in."""

    prompt_tokens: Whole | None = None
    completion_tokens: Whole | None = None
    total_tokens: Whole | None = None
    input_tokens: Whole | None = None
    output_tokens: Whole | None = None
    cache_read_input_tokens: Whole | None = None
    cache_creation_input_tokens: Whole | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None

    def counts(self) -> Counts:
        prompt = self.prompt_tokens
        if prompt is None and self.input_tokens is not None:
            prompt = self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        output = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        return Counts(
            self.total_tokens if prompt is None and output is None else prompt,
            output,
            self.cache_read_input_tokens if details is None else details.cached_tokens,
        )
