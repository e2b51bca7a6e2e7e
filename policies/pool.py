"""The backends of a pool together: who is there, what each holds of a prompt, what all of them teach."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies.admission import Admission, FixedConcurrency, PrefillGate
from policies.backend import COLD, Backend, Slot, Ticket
from policies.estimate import Prefills
from policies.prefix import PrefixIndex
from policies.routing import Load, Price
from policies.rules import Rules
from policies.types import BackendStatistics, BackendView, Candidate, Ending, Gate, Job, RemoteLoad, Usage


class Pool:
    """The present backends, the index of their caches, and what their prefills teach: how long they take, and how far
    they put the streams beside them behind.

    Both are pooled: one replica's own rate from a score of samples is noise, and cold work would flock to whoever
    looked fastest. An operator may declare that backends differ (`BackendView.speed`).
    """

    def __init__(self, rules: Rules, piece_tokens: float, *, gated: bool) -> None:
        self.rules = rules
        self.backends: dict[str, Backend] = {}
        self.index = PrefixIndex()
        self.times = Prefills(1.0 / rules.prefill_rate, rules.prior_tokens, keep=rules.keep)
        self.losses = Prefills(0.0, rules.prior_tokens, keep=rules.keep)
        self.admission = self.admit(gated=gated)
        self.trust = 1.0  # what a token found in the index is worth, on the backends' mean
        self._piece_tokens = piece_tokens
        self.heard: dict[str, float] = {}  # when each other gateway last spoke

    def __repr__(self) -> str:
        return f"<Pool [{', '.join(map(repr, self.backends.values()))}]>"

    def admit(self, *, gated: bool) -> Admission:
        """Choose how much may be in flight: by the prefill gate, or by plain concurrency."""
        self.admission = PrefillGate(self.rules, self.times, self.losses) if gated else FixedConcurrency()
        return self.admission

    def observe(self, views: Sequence[BackendView], now: float) -> list[str]:
        """Take `views` for the present set. Returns the names that came, went, returned, opened or shut."""
        changed: list[str] = []
        present = {view.name: view for view in views}
        for name, backend in list(self.backends.items()):
            view = present.get(name)
            if view is None or view.incarnation != backend.view.incarnation:
                del self.backends[name]
                self.index.forget(name)
                changed.append(name)
        for name, view in present.items():
            known = self.backends.get(name)
            if known is None:
                self.backends[name] = Backend(view, self.rules)
                changed.append(name)
            elif known.view != view:
                if (known.view.open, known.view.region) != (view.open, view.region):
                    changed.append(name)
                known.view = view
            tokens = self.rules.index_tokens if view.kv_tokens is None else view.kv_tokens * self.rules.index_share
            self.index.resize(name, int(tokens / self._piece_tokens))
        return list(dict.fromkeys(changed))

    def hear(self, gateway: str, loads: Sequence[RemoteLoad], now: float) -> None:
        """Another gateway has said what it has on the backends; those it does not name it has nothing on."""
        self.heard[gateway] = now
        said = {load.backend: load for load in loads}
        for name, backend in self.backends.items():
            if gateway in backend.peers or name in said:
                backend.hear(gateway, said.get(name), now)

    def forget_silent(self, now: float) -> None:
        """Drop what gateways said that have not spoken for long."""
        for gateway, heard in list(self.heard.items()):
            if now >= heard + self.rules.peer_silence_s:
                self.hear(gateway, (), now)
                del self.heard[gateway]

    def next_silence(self) -> float:
        """When the gateway that spoke least recently will be forgotten; infinity if there is none."""
        return min(self.heard.values(), default=inf) + self.rules.peer_silence_s

    def serves(self, job: Job) -> bool:
        """Whether any backend could ever take the job."""
        return any(b.view.open and job.allows(name) for name, b in self.backends.items())

    def spare(self) -> list[Backend]:
        """The open backends."""
        gate = self.admission.gate
        found = []
        for backend in self.backends.values():
            backend.need_s = backend.open_at = inf
            if gate(backend) is Gate.OPEN:
                found.append(backend)
        return found

    def load(self, now: float) -> Load:
        """What prices are made of."""
        backends = self.backends
        running = sum(b.running for b in backends.values()) + 1
        return Load(now, self.times, running / max(1, len(backends)), self.rules)

    def assess(self, ticket: Ticket) -> bool:
        """Look up what the backends hold of the ticket's prompt, unless nothing changed since. Returns whether its
        prefill has another length now: then it stands at the wrong place in the queue."""
        if ticket.version == self.index.version:
            return False
        ticket.version = self.index.version
        before = ticket.cold, ticket.warm
        job, piece = ticket.job, ticket.job.piece_tokens
        common, more = self.index.match(job.prefix)
        ticket.common, ticket.held = common, more
        cold = ticket.cold = max(1, job.prompt_tokens - int(common * piece * self.trust))
        if more:
            backends = self.backends
            warm = {n: max(1, job.prompt_tokens - int(k * piece * backends[n].trust)) for n, k in more.items()}
            ticket.warm = {name: tokens for name, tokens in warm.items() if tokens < cold}
        else:
            ticket.warm = {}
        if job.prefix:
            ticket.novel = job.prefix[min(max(more.values(), default=common), len(job.prefix) - 1)]
        return before != (ticket.cold, ticket.warm)

    def enlane(self, ticket: Ticket) -> None:
        """Choose the lanes in which the ticket waits."""
        enough = ticket.cold - max(self.rules.save_tokens, self.rules.save_share * ticket.cold)
        warm = [(tokens, name) for name, tokens in ticket.warm.items() if tokens <= enough and ticket.job.allows(name)]
        if len(warm) > self.rules.lanes:
            warm = sorted(warm)[: self.rules.lanes]
        ticket.lanes = tuple(name for _, name in warm)
        ticket.places = tuple(filter(ticket.job.allows, self.backends)) if ticket.restricted else (COLD, *ticket.lanes)

    def candidates(self, ticket: Ticket, price: Price, load: Load) -> tuple[Candidate, ...]:
        """Every backend that the job may use, as it looks to the ticket now."""
        allowed = [backend for backend in self.backends.values() if ticket.job.allows(backend.name)]
        gates = {backend.name: self.admission.gate(backend) for backend in allowed}
        wishes = [(backend, backend.need_s, backend.open_at) for backend in allowed]
        fits = self.admission.fitting(ticket, [b for b in allowed if gates[b.name] is Gate.OPEN], load.now)
        for backend, need_s, open_at in wishes:  # who only asks waits for nothing
            backend.need_s, backend.open_at = need_s, open_at
        found = []
        for b in allowed:
            gate = gates[b.name]
            if gate is Gate.OPEN and b not in fits:
                gate = Gate.PREFILL if b.in_flight else Gate.DEBT
            cost = price(ticket, b, load) if b in fits else None
            cached, uncached = ticket.matched(b.name), ticket.uncached(b.name)
            found.append(
                Candidate(b.name, gate, cached, uncached, b.left(load.now), b.running, b.credit(load.now), cost)
            )
        return tuple(found)

    def statistics(self, now: float) -> dict[str, BackendStatistics]:
        """Every backend's counters."""
        gate = self.admission.gate
        return {
            name: BackendStatistics(gate(b), b.running, b.in_flight, b.credit(now), b.kv, b.accuracy.value)
            for name, b in self.backends.items()
        }

    def known_time(self, uncached: int, whole: int) -> float:
        """What a prefill should take once that was learned, and nothing before: nobody is refused on a guess."""
        return self.times.expect(uncached, whole) if self.times.samples >= self.rules.samples else 0.0

    def timed(self, slot: Slot, now: float) -> None:
        """The prefill of `slot` was seen to end now: learn from how long it took."""
        backend = slot.backend
        context = slot.job.prompt_tokens - slot.uncached / 2
        if (seconds := now - backend.began) > 0.0:
            self.times.add(slot.uncached, context, seconds * backend.view.speed)
        if backend.began_ahead is not None and backend.streams:
            self.losses.add(slot.uncached, context, backend.began_ahead - backend.ahead(now))

    def learn(self, slot: Slot, ending: Ending, usage: Usage | None) -> None:
        """`slot` has ended: compare what its backend had cached with what was expected. Of one that failed nothing is
        expected any more, or a dead backend would be the favourite for all that it ever computed."""
        backend = slot.backend
        if ending is Ending.DROPPED and self.backends.get(backend.name) is backend:
            self.index.remove(slot.job.prefix, backend.name)
        if ending is Ending.SUCCESS and usage is not None and usage.cached is not None and slot.matched:
            slot.backend.accuracy.add(min(usage.cached, slot.matched), slot.matched)
            slot.backend.trust = slot.backend.accuracy.value
            self.trust = sum(b.trust for b in self.backends.values()) / max(1, len(self.backends))
