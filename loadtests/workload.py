"""Traffic for a simulation: the requests of a trace with all that a seed draws about them, and when they come.

Every attribute has its own random stream, so that two scenarios with one seed differ only where they should.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from math import exp
from random import Random

from loadtests.profiles import S
from loadtests.scenario import SHARES, Scenario
from loadtests.traces import Request, Session, Turn, load, sessions

BURST_S = 60.0


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way through the simulation: what was drawn for it, then what became of it.

    Moments are picoseconds of simulated time. `error` is by what the gateway misjudges its tokens. `strict_s` is the
    TTFT limit that counts only the tokens that are new in the session.
    """

    id: int
    request: Request
    arrived_ps: int
    limit_s: float
    tenant: str = "all"
    class_: str = "interactive"
    gateway: int = 0
    streamed: bool = True
    error: float = 1.0
    strict_s: float | None = None
    user: int = -1
    dispatched_ps: int | None = None
    backend: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    first_ps: int | None = None
    last_ps: int | None = None
    refused: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_ps is None else (self.first_ps - self.arrived_ps) / S

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; 0 for answers of one token."""
        if self.first_ps is None or self.last_ps is None:
            return None
        return (self.last_ps - self.first_ps) / S / max(1, self.request.output_tokens - 1)


class _Draws:
    """The random attributes of calls, in the order in which they are made."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self._ids = count(1)
        self._limits: dict[int, float] = {}
        self._tenant, self._class, self._error, self._stream, self._gateway = (
            Random(f"{seed} {name}") for name in ("tenant", "class", "error", "stream", "gateway")
        )
        shares = [share * (scenario.aggressor if i == 3 else 1.0) for i, share in enumerate(SHARES[: scenario.tenants])]
        self._shares = list(accumulate(shares)) if scenario.tenants > 0 else []

    def call(self, request: Request, at_s: float) -> Call:
        scenario = self.scenario
        call = Call(next(self._ids), request, int(at_s * S), self._limit_s(request.prompt_tokens))
        if self._shares:
            drawn = self._tenant.random() * self._shares[-1]
            call.tenant = f"tenant-{next(i for i, upto in enumerate(self._shares) if drawn <= upto)}"
        elif scenario.tenants < 0:
            call.tenant = request.client
        call.class_ = "batch" if self._class.random() < scenario.batch else "interactive"
        call.error = scenario.estimate_bias * exp(scenario.estimate_error * self._error.gauss(0.0, 1.0))
        call.streamed = self._stream.random() >= scenario.non_streamed
        call.gateway = self._gateway.randrange(scenario.gateways)
        return call

    def _limit_s(self, prompt_tokens: int) -> float:
        limit_s = self._limits.get(prompt_tokens)
        if limit_s is None:
            limit_s = self._limits[prompt_tokens] = self.scenario.ttft_limit_s(prompt_tokens)
        return limit_s


class OpenLoop:
    """The requests of a trace, whatever becomes of them."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self._requests = load(scenario.trace, seed)[: scenario.limit or None]
        self.piece_tokens = self._requests[0].piece_tokens
        self._draws = _Draws(scenario, seed)
        self.burst_s = self._requests[-1].at_s / scenario.load / 2

    def start(self) -> Iterator[Call]:
        """Calls in the order of arrival."""
        rate, without = self.scenario.load, self.scenario.without
        for request in self._requests:
            at_s = request.at_s / rate
            if self.scenario.burst > 1.0:
                at_s = _squeezed(at_s, self.burst_s, BURST_S, self.scenario.burst)
            call = self._draws.call(request, at_s)
            if not without or without not in (call.tenant, call.class_):
                yield call

    def after(self, call: Call, now_ps: int) -> Call | None:
        """What the end of `call` brings: nothing."""
        return None


class ClosedLoop:
    """Users at work in sessions: each sends its next request a pause after the answer to the one before.

    As many users as `scenario.sessions` begin within the first minutes; one that ends a session begins the next that
    nobody has taken yet, from the top again after the last. A refused request's session goes on.
    """

    RAMP_S = 300.0

    def __init__(self, scenario: Scenario, seed: int, until_s: float) -> None:
        self.scenario = scenario
        self.until_ps = int(until_s * S)
        self._sessions = sessions(seed)
        self.piece_tokens = self._sessions[0][0].request.piece_tokens
        self._taken = 0
        self._draws = _Draws(scenario, seed)
        self._pauses = Random(f"{seed} ramp")
        self._left: list[Iterator[Turn]] = []

    def start(self) -> Iterator[Call]:
        starts = sorted(self.RAMP_S * self._pauses.random() for _ in range(self.scenario.sessions))
        for user, at_s in enumerate(starts):
            self._left.append(iter(self._next_session()))
            yield self._call(next(self._left[user]), user, at_s)

    def after(self, call: Call, now_ps: int) -> Call | None:
        """The same user's next request, unless its time is over."""
        turn = next(self._left[call.user], None)
        if turn is None:
            self._left[call.user] = iter(self._next_session())
            turn = next(self._left[call.user])
        following = self._call(turn, call.user, now_ps / S + turn.think_s)
        return following if following.arrived_ps < self.until_ps else None

    def _next_session(self) -> Session:
        self._taken += 1
        return self._sessions[(self._taken - 1) % len(self._sessions)]

    def _call(self, turn: Turn, user: int, at_s: float) -> Call:
        call = self._draws.call(turn.request, at_s)
        call.user = user
        tokens = turn.request.prompt_tokens
        alone_s = self.scenario.isolated_s(tokens, tokens - turn.new_tokens)
        call.strict_s = self.scenario.slo_ttft_s + self.scenario.slo_prefills * alone_s
        return call


def _squeezed(at_s: float, start_s: float, length_s: float, times: float) -> float:
    """Time so warped that arrivals come `times` as fast for `length_s` from `start_s` on."""
    if at_s <= start_s:
        return at_s
    within = (at_s - start_s) / times
    return start_s + within if within <= length_s else at_s - length_s * (times - 1.0)
