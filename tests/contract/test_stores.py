"""What every store keeps to, in memory and on every server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import pytest

from gateway.stores import Account, Store, Verdict
from policies.limits import Kind, Limit
from tests.contract.conftest import Opening

pytestmark = pytest.mark.anyio

REQUESTS, TOKENS, PLACES = Limit(Kind.REQUESTS, 60, 60), Limit(Kind.TOKENS, 6000, 6000), Limit(Kind.CONCURRENT, 5)
LIMITS = [REQUESTS, TOKENS, PLACES]


def name() -> str:
    """A tenant that nobody else is; names may hold anything."""
    return f"acme {{{uuid4().hex}}} ü:*"


async def take(account: Account, tokens: int = 1, places: int = 0) -> Verdict:
    needs = [(0, REQUESTS.cost(1)), (1, TOKENS.cost(tokens)), (2, places)]
    verdict = account.take([need for need in needs if need[1]])
    return await verdict if isinstance(verdict, asyncio.Future) else verdict


async def account(opened: Opening, limits: Sequence[Limit] = LIMITS) -> Account:
    return (await opened()).account(name(), limits, None)


async def test_a_burst_fits_exactly(opened: Opening) -> None:
    """Sixty requests, and the next one is told when it may come."""
    own = await account(opened)
    verdicts = [await take(own) for _ in range(70)]
    assert verdicts[:60] == [None] * 60
    no = verdicts[69]
    assert no is not None
    assert (no.limit, no.requested) == (REQUESTS, 1)
    assert no.used in (59, 60)
    assert no.wait_us is not None
    assert 0 < no.wait_us <= 1_000_000


async def test_requests_at_the_same_time_are_decided_one_by_one(opened: Opening) -> None:
    """All at once they get no more than one after the other."""
    own = await account(opened)
    verdicts = await asyncio.gather(*(take(own) for _ in range(200)))
    assert verdicts.count(None) == 60


async def test_a_refusal_by_one_limit_charges_none(opened: Opening) -> None:
    """Refused for tokens, it has used no request."""
    own = await account(opened)
    assert await take(own, tokens=5000) is None
    for _ in range(20):
        no = await take(own, tokens=2000)
        assert no is not None
        assert no.limit is TOKENS
    assert own.standing(0).used == 1


async def test_what_can_never_fit_is_told_so(opened: Opening) -> None:
    """More tokens than the limit has room for."""
    own = await account(opened)
    no = await take(own, tokens=6001)
    assert no is not None
    assert (no.limit, no.wait_us) == (TOKENS, None)


async def test_what_comes_back_can_be_used_again(opened: Opening) -> None:
    """As after a reservation that was too long."""
    own = await account(opened)
    for _ in range(10):
        assert await take(own, tokens=6000) is None
        own.give(1, TOKENS.cost(6000))
        await asyncio.sleep(0.05)
    assert own.standing(1).remaining >= 5990


async def test_more_than_was_reserved_is_charged_on_top(opened: Opening) -> None:
    """A debt, to be paid off before the next request."""
    own = await account(opened)
    assert await take(own, tokens=100) is None
    own.give(1, TOKENS.cost(100) - TOKENS.cost(9000))
    await eventually_refused(own)
    no = await take(own, tokens=10)
    assert no is not None
    assert no.wait_us is not None
    assert 28_000_000 < no.wait_us <= 30_100_000


async def eventually_refused(own: Account) -> None:
    for _ in range(300):
        if own.standing(1).remaining == 0:
            return
        await take(own, tokens=6000)  # asks the store, and is refused
        await asyncio.sleep(0.01)
    raise AssertionError(own.standing(1))


async def test_requests_at_once(opened: Opening) -> None:
    """As many as there are places, and again when they have ended."""
    own = await account(opened)
    for _ in range(3):
        verdicts = await asyncio.gather(*(take(own, places=1) for _ in range(9)))
        assert verdicts.count(None) == 5
        no = next(verdict for verdict in verdicts if verdict is not None)
        assert (no.limit.kind, no.used, no.requested) == (Kind.CONCURRENT, 5, 1)
        for _ in range(5):
            own.give(2, 1)
        await asyncio.sleep(0.1)


async def test_tenants_do_not_share(opened: Opening) -> None:
    """What one uses is nothing to another, whose name begins alike."""
    store: Store = await opened()
    one = name()
    accounts = [store.account(tenant, LIMITS, None) for tenant in (one, one + "}", "{" + one)]
    for own in accounts:
        assert [await take(own) for _ in range(60)] == [None] * 60


async def test_a_request_that_left_while_waiting_takes_nothing_with_it(opened: Opening) -> None:
    """Cancelled at any moment, its charge comes back."""
    own = await account(opened)
    for turn in range(30):
        verdict = own.take([(0, REQUESTS.cost(1)), (2, 1)])
        if isinstance(verdict, asyncio.Future):
            if turn % 3:
                await asyncio.sleep(0)
            verdict.cancel()
        else:
            own.give(0, REQUESTS.cost(1))
            own.give(2, 1)
        await asyncio.sleep(0.03)
    verdicts = await asyncio.gather(*(take(own, places=1) for _ in range(5)))
    assert verdicts == [None] * 5
    assert own.standing(0).used <= 6


async def test_limits_of_one_model_and_of_all(opened: Opening) -> None:
    """Both are charged, and the tighter one refuses."""
    small = Limit(Kind.REQUESTS, 10, 10, "m")
    own = await account(opened, [REQUESTS, small])

    async def ask(*indexes: int) -> Verdict:
        verdict = own.take([(i, own.limits[i].cost(1)) for i in indexes])
        return await verdict if isinstance(verdict, asyncio.Future) else verdict

    verdicts = [await ask(0, 1) for _ in range(15)]
    assert verdicts.count(None) == 10
    assert {no.limit for no in verdicts if no is not None} == {small}
    assert [await ask(0) for _ in range(50)] == [None] * 50
