"""From a request to what the scheduler sees of it, and from an answer to what the estimators learn."""

from __future__ import annotations

from gateway.exchange import Exchange
from gateway.isolation import Seeds
from policies.estimate import BytesPerToken, OutputLengths
from policies.prefix import PIECE_BYTES, digests
from policies.types import Job, Usage


class Jobs:
    """Makes jobs of exchanges. What it has learned of prompts and outputs outlives a reload."""

    def __init__(self, seeds: Seeds) -> None:
        self._seeds = seeds
        self._bytes_per_token = BytesPerToken()
        self._lengths = OutputLengths()

    def job(self, x: Exchange, number: int) -> Job:
        """Backends tried before are excluded. A request without generated output is one-shot work."""
        assert x.tenant is not None
        assert x.call is not None
        tenant, call = x.tenant, x.call
        return Job(
            id=number,
            tenant=tenant.name,
            arrived=x.received_at,
            class_=x.class_,
            weight=tenant.weight,
            prompt_tokens=self._bytes_per_token.tokens(call.label, call.prompt_bytes),
            output_tokens=self._output_tokens(x) if call.endpoint.generates else 0,
            prefix=digests(call.prompt, self._seeds.seed(call.label, tenant.trust_group)),
            piece_tokens=PIECE_BYTES / self._bytes_per_token.value(call.label),
            streamed=call.stream,
            deadline=None if call.deadline_s is None else x.received_at + call.deadline_s,
            tried=frozenset([attempt.backend.name for attempt in x.attempts]) if x.attempts else NONE,
        )

    def _output_tokens(self, x: Exchange) -> int:
        assert x.tenant is not None
        assert x.call is not None
        expected = round(self._lengths.expected(x.tenant.name, x.call.label))
        limit = x.call.max_tokens
        return expected if limit is None else min(expected, limit)

    def learn(self, x: Exchange, usage: Usage) -> None:
        """What a whole answer has told of its prompt and its length."""
        assert x.tenant is not None
        assert x.call is not None
        self._bytes_per_token.learn(x.call.label, x.call.prompt_bytes, usage.prompt)
        if x.call.endpoint.generates:
            self._lengths.learn(x.tenant.name, x.call.label, usage.output)


NONE: frozenset[str] = frozenset()
