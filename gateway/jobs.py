"""From a request to what the scheduler sees of it, and from an answer to what the estimators learn."""

from __future__ import annotations

from gateway.catalog import Tenant
from gateway.exchange import Call, Exchange
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

    def reseed(self, seeds: Seeds) -> None:
        """Prompts are known by these from now on: by the same digests, unless the secret is another one."""
        self._seeds = seeds

    def job(self, x: Exchange, number: int) -> Job:
        """Backends tried before are excluded, and the time that they took is no wait for a turn. A request without
        generated output is one-shot work."""
        assert x.tenant is not None
        assert x.call is not None
        tenant, call = x.tenant, x.call
        bytes_per_token = self._bytes_per_token.value(call.label)
        return Job(
            id=number,
            tenant=tenant.name,
            arrived=x.received_at + sum(each.ended_at - each.dispatched_at for each in x.attempts if each.ended_at),
            class_=x.class_,
            weight=tenant.weight,
            prompt_tokens=max(1, round(call.prompt_bytes / bytes_per_token)),
            output_tokens=self._output_tokens(x) if call.endpoint.generates else 0,
            prefix=self._prefix(call, tenant),
            piece_tokens=PIECE_BYTES / bytes_per_token,
            streamed=call.stream,
            deadline=None if call.deadline_s is None else x.received_at + call.deadline_s,
            tried=frozenset([attempt.backend.name for attempt in x.attempts]) if x.attempts else NONE,
        )

    def _prefix(self, call: Call, tenant: Tenant) -> tuple[bytes, ...]:
        if call.prompt_bytes < PIECE_BYTES:
            return ()
        return digests(call.prompt, self._seeds.seed(call.label, tenant.trust_group))

    def _output_tokens(self, x: Exchange) -> int:
        assert x.tenant is not None
        assert x.call is not None
        expected = round(self._lengths.expected(x.tenant.name, x.call.label))
        limit = x.call.max_tokens
        return expected if limit is None else min(expected, limit)

    def prompt_tokens(self, call: Call) -> int:
        """Tokens of its prompt, as estimated."""
        return self._bytes_per_token.tokens(call.label, call.prompt_bytes)

    def reserve(self, x: Exchange, most_tokens: int) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer as a limit should set them aside: as many as it may have, else the
        length that nine in ten of the tenant's do not exceed. What nothing is known of must not use up a small limit
        of `most_tokens`, nor must what is only expected be more than ever fits."""
        assert x.tenant is not None
        assert x.call is not None
        call = x.call
        prompt_tokens = self.prompt_tokens(call)
        if not call.endpoint.generates or call.max_tokens is not None:
            return prompt_tokens, call.max_tokens or 0
        tenant = x.tenant.name
        expected = round(self._lengths.high(tenant, call.label))
        if not self._lengths.knows(tenant, call.label):
            expected = min(expected, most_tokens // UNKNOWN_SHARE)
        return prompt_tokens, max(1, min(expected, most_tokens - prompt_tokens))

    def learn(self, x: Exchange, usage: Usage) -> None:
        """What a whole answer has told of its prompt and its length."""
        assert x.tenant is not None
        assert x.call is not None
        self._bytes_per_token.learn(x.call.label, x.call.prompt_bytes, usage.prompt)
        if x.call.endpoint.generates:
            self._lengths.learn(x.tenant.name, x.call.label, usage.output)


UNKNOWN_SHARE = 8  # requests at once that a limit lets through before the first answer has told how long they are
NONE: frozenset[str] = frozenset()
