"""What a tenant may use: held from before the queue to the end of the answer, then settled to what was really used."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from gateway.errors import (
    CONCURRENCY_LIMIT,
    LIMITS_UNAVAILABLE,
    REQUEST_EXCEEDS_LIMIT,
    REQUESTS_LIMIT,
    TOKENS_LIMIT,
    Refused,
    Unavailable,
)
from gateway.exchange import Exchange, Header
from gateway.jobs import Jobs
from gateway.limitmetrics import LimitMetrics, Where
from gateway.metrics import Counter, Family, Gauge
from gateway.stores import Account, Store, StoreAway
from policies.limits import Denied, Kind, Limit, Need, Standing

LONGEST_WAIT_US = 60_000_000  # the longest that every SDK obeys; who has to wait longer had better not try again
REFUSALS = {
    Kind.REQUESTS: (REQUESTS_LIMIT, "Rate limit reached", "requests per min (RPM)"),
    Kind.TOKENS: (TOKENS_LIMIT, "Rate limit reached", "tokens per min (TPM)"),
    Kind.CONCURRENT: (CONCURRENCY_LIMIT, "Limit reached", "concurrent requests"),
}
NAMES = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset"))
    for kind in (Kind.REQUESTS, Kind.TOKENS)
}
MODES = ("memory", "shared", "local_share", "deny", "allow")
NO_LIMITS = nullcontext()


class Holding(Protocol):
    """An `async with`."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc: Any) -> object: ...


class Plan:
    """The limits of one tenant, and which of them concern which model. `touched`: some of them may be in use."""

    def __init__(self, account: Account, *, touched: bool = False) -> None:
        self.account = account
        self.touched = touched
        self._general = Terms(account, "")
        self._models = {limit.model: Terms(account, limit.model) for limit in account.limits}

    def of(self, model: str) -> Terms:
        """The limits that a request for a model is charged to."""
        return self._models.get(model, self._general)


class Terms:
    """The limits of an account that concern one model, with their indexes there. `tokens` is the most that any of them
    takes at one moment, 0 where tokens are not limited; `shown` are the indexes of each kind that clients are told
    of, with the names of the headers."""

    def __init__(self, account: Account, model: str) -> None:
        self.account = account
        self.limits = [(i, limit) for i, limit in enumerate(account.limits) if limit.model in ("", model)]
        self.tokens = min((limit.burst for _, limit in self.limits if limit.kind is Kind.TOKENS), default=0)
        kinds = {kind: [i for i, limit in self.limits if limit.kind is kind] for kind in (Kind.REQUESTS, Kind.TOKENS)}
        self.shown = [(NAMES[kind], indexes) for kind, indexes in kinds.items() if indexes]

    def headers(self) -> list[Header]:
        """`x-ratelimit-*` of the tightest limit of each kind, in the names and formats of OpenAI's API."""
        lines: list[Header] = []
        for (limit, remaining, reset), indexes in self.shown:
            tightest = self.account.standing(indexes[0])
            for index in indexes[1:]:
                tightest = min(tightest, self.account.standing(index), key=lambda each: each.remaining)
            lines.append((limit, b"%d" % tightest.limit.amount))
            lines.append((remaining, b"%d" % tightest.remaining))
            lines.append((reset, duration(tightest.reset_us).encode()))
        return lines


class Quota:
    """All tenants' limits. `async with quota` runs the store. `clock` is in seconds."""

    def __init__(self, store: Store, jobs: Jobs, clock: Callable[[], float]) -> None:
        self.store = store
        self.jobs = jobs
        self.clock = clock
        self.told = LimitMetrics()
        self._plans: dict[str, Plan] = {}

    def __repr__(self) -> str:
        return f"<Quota {self.store.mode} of {len(self._plans)} tenants>"

    async def __aenter__(self) -> Quota:
        await self.store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.store.__aexit__(*exc)

    def apply(self, limits: Mapping[str, Sequence[Limit]], named: Collection[str] = ()) -> None:
        """These limits from now on. What is used of them stays; requests that run settle to the account that they
        were charged to. The tenants that are `named` have series of their own in metrics."""
        plans: dict[str, Plan] = {}
        for tenant, told in limits.items():
            before = self._plans.get(tenant)
            if before is not None and before.account.limits == tuple(told):
                plans[tenant] = before
            elif told:
                account = self.store.account(tenant, told, before.account if before else None)
                plans[tenant] = Plan(account, touched=before is not None and before.touched)
        for tenant, old in self._plans.items():
            if plans.get(tenant) is not old:
                old.account.retire()
        self._plans = plans
        self.told.begin(limits, named)

    def hold(self, x: Exchange) -> Holding:
        """`async with quota.hold(x)`: entered when the request is within its tenant's limits, and charged to them; left
        when what was really used is settled. Raises Refused, and Unavailable where the operator wants no decision
        without the store."""
        assert x.tenant is not None
        plan = self._plans.get(x.tenant.name)
        if plan is None:
            return NO_LIMITS
        assert x.call is not None
        plan.touched = True
        return Hold(self, plan.of(x.call.label), x)

    def metrics(self) -> Iterator[Family]:
        """How limits stand and how they are counted now, and what calls to the store came to."""
        yield from self.told.metrics(self._in_use())
        mode = Gauge("headrace_limiter_mode", "How limits are counted: 1 for the mode.", "mode", total="max")
        mode.values.update({(name,): int(name == self.store.mode) for name in MODES})
        yield mode
        calls = Counter("headrace_limiter_calls_total", "Calls to the store of the limits.", "outcome")
        calls.values.update({(outcome,): count for outcome, count in self.store.calls.items()})
        yield calls

    def usage(self) -> dict[str, list[Standing]]:
        """How every limit of every tenant stands, as far as it is known here."""
        return {tenant: standings(plan.account) for tenant, plan in self._plans.items()}

    def _in_use(self) -> Iterator[tuple[str, Sequence[Standing]]]:
        """The tenants who use anything, however many have limits."""
        for tenant, plan in self._plans.items():
            if plan.touched:
                found = standings(plan.account)
                plan.touched = any(each.used for each in found)
                yield tenant, found


def standings(account: Account) -> list[Standing]:
    """How all limits of an account stand."""
    return [account.standing(index) for index in range(len(account.limits))]


class Hold:
    """The `async with` of one request's quota."""

    __slots__ = ("_exchange", "_needs", "_prompt_tokens", "_quota", "_terms")

    def __init__(self, quota: Quota, terms: Terms, exchange: Exchange) -> None:
        self._quota = quota
        self._terms = terms
        self._exchange = exchange
        self._needs: list[Need] = []
        self._prompt_tokens = 0

    async def __aenter__(self) -> None:
        x, terms, quota, tokens = self._exchange, self._terms, self._quota, 0
        if terms.tokens:
            self._prompt_tokens, output_tokens = quota.jobs.reserve(x, terms.tokens)
            tokens = self._prompt_tokens + output_tokens
        needs = [(index, limit.unit or limit.cost(tokens)) for index, limit in terms.limits]
        where, began_at = Where.HERE, quota.clock()
        try:
            verdict = terms.account.take(needs)
            if isinstance(verdict, Future):
                where = Where.STORE
                verdict = await self._awaited(verdict, needs)
        except StoreAway as away:
            raise Unavailable(LIMITS_UNAVAILABLE, "Limits cannot be checked now.", retry_after=1.0) from away
        finally:
            quota.told.decided[where].observe(quota.clock() - began_at)
        x.answer_headers += terms.headers()
        if verdict is not None:
            raise refused(verdict, x)
        self._needs = needs

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        terms = self._terms
        requests, tokens = used(self._exchange, exc, self._prompt_tokens)
        for (index, charged), (_, limit) in zip(self._needs, terms.limits, strict=True):
            surplus = charged - (limit.cost(requests if limit.unit else tokens) if limit.drains else 0)
            if surplus:
                terms.account.give(index, surplus)

    async def _awaited(self, verdict: Future[Denied | None], needs: Sequence[Need]) -> Denied | None:
        try:
            return await verdict
        except BaseException:
            if verdict.done() and not verdict.cancelled() and verdict.exception() is None and verdict.result() is None:
                for index, cost in needs:  # it was let through just as it was cancelled
                    self._terms.account.give(index, cost)
            raise


def used(x: Exchange, exc: BaseException | None, prompt_tokens: int) -> tuple[int, int]:
    """Requests and tokens that a request is charged for in the end.

    1. Nothing was sent: nothing, not even the request. 2. The engine said what it used: that. 3. Tokens were seen:
    they and the prompt. 4. The backend failed or refused: no tokens, whatever became of the request while it waited for
    another one. 5. The client left before the first token, or the answer does not tell: the prompt.
    """
    for attempt in x.attempts:
        if attempt.connected_at:
            break
    else:
        return 0, 0
    meter = x.meter
    usage = meter.usage if meter is not None else None
    if usage is not None:
        return 1, (usage.prompt or prompt_tokens) + usage.output
    if meter is not None and meter.tokens:
        return 1, prompt_tokens + meter.tokens
    last = x.attempts[-1]
    if last.failed or not last.connected_at or (exc is None and x.status >= 400):
        return 1, 0
    return 1, prompt_tokens


def refused(denied: Denied, x: Exchange) -> Refused:
    """The 429: which limit, what is used, what was asked for, and when to come again."""
    assert x.tenant is not None
    limit = denied.limit
    refusal, what, of = REFUSALS[limit.kind]
    model = f" for model {limit.model!r}" if limit.model else ""
    told = (
        f"{limit.amount} ({limit.burst} at one moment)"
        if limit.drains and limit.burst != limit.amount
        else limit.amount
    )
    where = f"{model} of tenant {x.tenant.name!r} on {of}: Limit {told}"
    wait_us = denied.wait_us
    if wait_us is None:
        advice = "Ask for less: a shorter prompt, or fewer output tokens." if limit.kind is Kind.TOKENS else ""
        message = f"Request too large{where}, Requested {denied.requested}. {advice}".strip()
        return Refused(REQUEST_EXCEEDS_LIMIT, message, retry=False)
    again = duration(wait_us) if limit.drains else "a moment"
    message = f"{what}{where}, Used {denied.used}, Requested {denied.requested}. Please try again in {again}."
    retry = False if wait_us > LONGEST_WAIT_US else None
    return Refused(refusal, message, retry_after=wait_us / 1e6, retry=retry)


def duration(us: int) -> str:
    """As Go writes it and OpenAI's clients read it: `12ms`, `1.5s`, `6m0s`. Rounded up to a millisecond."""
    ms = -(-us // 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
