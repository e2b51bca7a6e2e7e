"""Discrete events around exact engines: calls arrive, routers decide, engines step, signals come back late.

Engines are simulated lazily. A stretch in which one only decodes is one event; it is cut short when something is
dispatched there. Whatever an engine shows is known to the router `signal_delay_s` after it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from loadtests import engine
from loadtests.fleet import Fleet, Replica
from loadtests.profiles import US, S
from loadtests.router import Router
from loadtests.scenario import Scenario
from loadtests.workload import Call
from policies.estimate import OutputLengths
from policies.types import Drop, Ending, Job, RemoteLoad, Usage


class Workload(Protocol):
    """Where calls come from."""

    def start(self) -> Iterator[Call]: ...
    def after(self, call: Call, now_ps: int) -> Call | None: ...


class Gateway:
    """One router, and what its gateway sees: which streams run where, and how many tokens they got."""

    def __init__(self, name: str, router: Router) -> None:
        self.name = name
        self.router = router
        self.lengths = OutputLengths()
        self.waiting = 0
        self.timer_ps: int | None = None
        self.streams: dict[str, dict[int, None]] = {}
        self.steps: dict[str, int] = {}
        self.ticking: set[str] = set()


class Simulation:
    """One run. `exact`: the routers see the fleet itself, which is then brought up to date before they are asked."""

    def __init__(
        self, scenario: Scenario, workload: Workload, fleet: Fleet, routers: list[Router], *, exact: bool = False
    ) -> None:
        self.scenario = scenario
        self.workload = workload
        self.fleet = fleet
        self.gateways = [Gateway(f"g{i}", router) for i, router in enumerate(routers)]
        self.calls: dict[object, Call] = {}
        self.done: list[Call] = []
        self._exact = exact
        self._delay_ps = int(scenario.signal_delay_s * S)
        self._gateway_ps = int(scenario.gateway_delay_s * S)
        self._events: list[tuple[int, int, Callable[[int, Any], None], Any]] = []
        self._serial = count()

    def run(self, until_ps: int | None = None) -> list[Call]:
        """All calls, in the order in which they ended; those that had not ended by `until_ps` come last."""
        arrivals = self.workload.start()
        self._next_arrival(arrivals)
        while self._events and (until_ps is None or self._events[0][0] < until_ps):
            now_ps, _, handle, argument = heappop(self._events)
            handle(now_ps, argument)
        return self.done + list(self.calls.values())

    def _at(self, at_ps: int, handle: Callable[[int, Any], None], argument: object) -> None:
        heappush(self._events, (at_ps, next(self._serial), handle, argument))

    # Calls come and go.

    def _next_arrival(self, arrivals: Iterator[Call]) -> None:
        if (call := next(arrivals, None)) is not None:
            self._at(call.arrived_ps, self._arrive_one, (call, arrivals))

    def _arrive_one(self, now_ps: int, argument: tuple[Call, Iterator[Call]]) -> None:
        call, arrivals = argument
        self._next_arrival(arrivals)
        self._arrive(now_ps, call)

    def _arrive(self, now_ps: int, call: Call) -> None:
        request = call.request
        self.calls[call.id] = call
        self.fleet.sequences[call.id] = engine.Sequence(
            call.id, request.prompt_tokens, request.output_tokens, self._digests(call), request.piece_tokens
        )
        gateway = self.gateways[call.gateway]
        if request.prompt_tokens + request.output_tokens > self.scenario.kv_tokens:
            self._end(now_ps, call, "longer than the KV memory")
            return
        self._sync(gateway, now_ps)
        if reason := gateway.router.submit(self._job(call, gateway), now_ps / S):
            self._end(now_ps, call, reason.value)
        else:
            gateway.waiting += 1
        self._pump(now_ps, gateway)

    def _job(self, call: Call, gateway: Gateway) -> Job:
        """The call as the gateway sees it. It counts tokens by bytes, hence one error for the prompt and its pieces; it
        digests whole pieces only, and none so short that an index would overflow with them."""
        request = call.request
        digests = self._digests(call)[: request.prompt_tokens // request.piece_tokens]
        stride = max(1, -(-256 // request.piece_tokens))
        arrived = call.arrived_ps / S
        return Job(
            call.id,
            call.tenant,
            arrived,
            class_=call.class_,
            prompt_tokens=max(1, round(request.prompt_tokens * call.error)),
            output_tokens=round(gateway.lengths.expected(call.tenant, "")),
            prefix=digests[stride - 1 :: stride],
            piece_tokens=request.piece_tokens * stride * call.error,
            streamed=call.streamed,
            deadline=arrived + call.limit_s if call.class_ == "interactive" else None,
        )

    def _digests(self, call: Call) -> tuple[bytes, ...]:
        """Salted by the tenant where tenants must not share a cache: engine and gateway then see other prompts."""
        if not self.scenario.salted:
            return call.request.digests
        return tuple(digest + call.tenant.encode() for digest in call.request.digests)

    def _end(self, now_ps: int, call: Call, refused: str = "") -> None:
        call.refused = refused
        self.done.append(self.calls.pop(call.id))
        del self.fleet.sequences[call.id]
        self.fleet.homes.pop(call.id, None)
        if (following := self.workload.after(call, now_ps)) is not None:
            self._at(following.arrived_ps, self._arrive, following)

    # Routers decide.

    def _pump(self, now_ps: int, gateway: Gateway, *, news: bool = True) -> None:
        """Do what is due. `news`: something happened here that the other gateways do not know yet."""
        if self._exact and gateway.waiting:
            for replica in self.fleet.replicas:
                self._advance(replica, now_ps)
        decisions = gateway.router.due(now_ps / S)
        for decision in decisions:
            gateway.waiting -= 1
            call = self.calls[decision.job.id]
            if isinstance(decision, Drop):
                self._end(now_ps, call, decision.reason.value)
            else:
                self._dispatch(now_ps, call, self.fleet.by_name[decision.backend])
        self._set_timer(now_ps, gateway)
        if gateway.waiting:
            for name in gateway.streams:
                self._tick_later(now_ps, gateway, name)
        if len(self.gateways) > 1 and (news or decisions):
            said = (gateway.name, gateway.router.publish(now_ps / S))
            self._at(now_ps + self._gateway_ps, self._tell, said)

    def _tell(self, now_ps: int, said: tuple[str, tuple[RemoteLoad, ...]]) -> None:
        """The other gateways hear what one has on the replicas."""
        name, loads = said
        for gateway in self.gateways:
            if gateway.name != name:
                gateway.router.observe_remote(name, loads, now_ps / S)
                self._pump(now_ps, gateway, news=False)

    def _set_timer(self, now_ps: int, gateway: Gateway) -> None:
        deadline = gateway.router.next_deadline()
        if deadline is not None:
            at_ps = max(int(deadline * S) + 1, now_ps + US)
            if gateway.timer_ps is None or at_ps < gateway.timer_ps:
                gateway.timer_ps = at_ps
                self._at(at_ps, self._timer, gateway)

    def _timer(self, now_ps: int, gateway: Gateway) -> None:
        if gateway.timer_ps == now_ps:
            gateway.timer_ps = None
            self._sync(gateway, now_ps)
            self._pump(now_ps, gateway)

    def _dispatch(self, now_ps: int, call: Call, replica: Replica) -> None:
        self._advance(replica, now_ps)
        sequence = self.fleet.sequences[call.id]
        call.dispatched_ps, call.backend = now_ps, replica.name
        self.fleet.homes[call.id] = replica
        replica.dispatched(sequence)
        self._plan(replica)

    # Engines step.

    def _plan(self, replica: Replica) -> None:
        replica.version += 1
        if (wake_ps := replica.engine.wake_ps()) is not None:
            self._at(wake_ps, self._wake, (replica, replica.version))

    def _wake(self, now_ps: int, argument: tuple[Replica, int]) -> None:
        replica, version = argument
        if replica.version == version:
            self._advance(replica, now_ps + 1)
            self._plan(replica)
            for gateway in self.gateways:
                if gateway.waiting and replica.name in gateway.streams:
                    self._tick_later(now_ps, gateway, replica.name)

    def _advance(self, replica: Replica, until_ps: int) -> None:
        for step in replica.advance(until_ps):
            if step.first or step.finished:
                self._at(step.end_ps, self._happen, (replica, step))

    def _happen(self, now_ps: int, argument: tuple[Replica, engine.Step]) -> None:
        """What a step showed takes place; the routers hear of it after the delay."""
        replica, step = argument
        for sequence in step.first:
            self.calls[sequence.id].first_ps = now_ps
            replica.prefilled(sequence)
        for sequence in step.finished:
            call = self.calls[sequence.id]
            call.last_ps = now_ps
            call.cached_tokens, call.preemptions = sequence.cached_tokens, sequence.preemptions
            replica.running -= 1
        if self._delay_ps:
            self._at(now_ps + self._delay_ps, self._hear, (replica, step))
        else:
            self._hear(now_ps, (replica, step))

    # Signals come back.

    def _hear(self, now_ps: int, argument: tuple[Replica, engine.Step]) -> None:
        replica, step = argument
        heard: dict[int, Gateway] = {}
        for sequence in (*step.first, *step.finished):
            index = self.calls[sequence.id].gateway
            if index not in heard:
                heard[index] = self.gateways[index]
                self._sync(heard[index], now_ps, replica.name)
        for sequence in step.first:
            call = self.calls[sequence.id]
            if call.streamed:
                gateway = self.gateways[call.gateway]
                gateway.router.first_token(call.id, now_ps / S)
                gateway.streams.setdefault(replica.name, {})[call.id] = None
                gateway.steps.setdefault(replica.name, replica.look(now_ps - self._delay_ps)[0])
        for sequence in step.finished:
            self._leave(now_ps, self.calls[sequence.id], replica)
        for gateway in heard.values():
            self._pump(now_ps, gateway)

    def _leave(self, now_ps: int, call: Call, replica: Replica) -> None:
        gateway = self.gateways[call.gateway]
        request = call.request
        gateway.router.leave(
            call.id,
            now_ps / S,
            Ending.SUCCESS,
            Usage(request.prompt_tokens, request.output_tokens, call.cached_tokens),
        )
        gateway.lengths.learn(call.tenant, "", request.output_tokens)
        if call.streamed:
            streams = gateway.streams[replica.name]
            del streams[call.id]
            if not streams:
                del gateway.streams[replica.name], gateway.steps[replica.name]
        self._end(now_ps, call)

    def _sync(self, gateway: Gateway, now_ps: int, only: str | None = None) -> None:
        """Tell the router of all tokens that came until now. One call stands for all streams of a replica."""
        for name in (only,) if only else tuple(gateway.streams):
            if streams := gateway.streams.get(name):
                steps, _ = self.fleet.by_name[name].look(now_ps - self._delay_ps)
                if gained := steps - gateway.steps[name]:
                    gateway.steps[name] = steps
                    gateway.router.tokens(next(iter(streams)), gained * len(streams), now_ps / S)

    def _tick_later(self, now_ps: int, gateway: Gateway, name: str) -> None:
        """While something waits, the router hears of every token as it comes, since one may open a backend."""
        if name not in gateway.ticking:
            self._tick_at(gateway, name, self.fleet.by_name[name].look(now_ps - self._delay_ps)[1])

    def _tick_at(self, gateway: Gateway, name: str, end_ps: int | None) -> None:
        if end_ps is not None:
            gateway.ticking.add(name)
            self._at(end_ps + self._delay_ps, self._tick, (gateway, name))

    def _tick(self, now_ps: int, argument: tuple[Gateway, str]) -> None:
        gateway, name = argument
        gateway.ticking.discard(name)
        if not gateway.waiting or not (streams := gateway.streams.get(name)):
            return
        steps, end_ps = self.fleet.by_name[name].look(now_ps - self._delay_ps)
        gained, gateway.steps[name] = steps - gateway.steps[name], steps
        if gained and gateway.router.tokens(next(iter(streams)), gained * len(streams), now_ps / S):
            self._pump(now_ps, gateway)
        elif name not in gateway.ticking:
            self._tick_at(gateway, name, end_ps)
