"""The backends of a pool together: who is there, what each holds of a prompt, what all of them teach."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies.admission import Admission
from policies.backend import COLD, Backend, Slot, Ticket
from policies.estimate import Ratio
from policies.prefix import PrefixIndex
from policies.routing import Load, Price
from policies.rules import Rules
from policies.types import BackendStatistics, BackendView, Candidate, Ending, Gate, Job, RemoteLoad, Usage


class Pool:
    """The present backends, the index of their caches, and the prefill rate that they share.

    The rate is pooled: one replica's own rate from a score of samples is noise, and cold work would flock to
    whoever looked fastest. An operator may declare that backends differ (`BackendView.speed`).
    """

    def __init__(self, rules: Rules, admission: Admission, piece_tokens: float) -> None:
        self.rules = rules
        self.admission = admission
        self.backends: dict[str, Backend] = {}
        self.index = PrefixIndex()
        self.rate = Ratio(rules.prefill_rate, 1.0, keep=0.99)
        self.trust = 1.0  # the backends' mean
        self.indebted: list[Backend] = []
        self._piece_tokens = piece_tokens
        self._heard: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Pool [{', '.join(map(repr, self.backends.values()))}]>"

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
                if known.view.open != view.open:
                    changed.append(name)
                known.view = view
            tokens = self.rules.index_tokens if view.kv_tokens is None else view.kv_tokens * self.rules.index_share
            self.index.resize(name, int(tokens / self._piece_tokens))
        return list(dict.fromkeys(changed))

    def hear(self, gateway: str, loads: Sequence[RemoteLoad], now: float) -> None:
        """Another gateway has said what it has on the backends; those it does not name it has nothing on."""
        self._heard[gateway] = now
        said = {load.backend: load for load in loads}
        for name, backend in self.backends.items():
            if gateway in backend.peers or name in said:
                backend.hear(gateway, said.get(name), now)

    def forget_silent(self, now: float) -> None:
        """Drop what gateways said that have not spoken for long."""
        for gateway, heard in list(self._heard.items()):
            if now - heard > self.rules.peer_silence_s:
                self.hear(gateway, (), now)
                del self._heard[gateway]

    def serves(self, job: Job) -> bool:
        """Whether any backend could ever take the job."""
        return any(b.view.open and job.allows(name) for name, b in self.backends.items())

    def spare(self, now: float) -> list[Backend]:
        """The open backends."""
        found: list[Backend] = []
        self.indebted = []
        gate = self.admission.gate
        for backend in self.backends.values():
            state = gate(backend, now)
            if state is Gate.OPEN:
                found.append(backend)
            elif state is Gate.DEBT:
                self.indebted.append(backend)
        return found

    def load(self, now: float) -> Load:
        """What prices are made of."""
        backends = self.backends
        running = sum(b.running for b in backends.values()) + 1
        return Load(now, self.rate.value, running / max(1, len(backends)), self.rules)

    def assess(self, ticket: Ticket) -> None:
        """Look up what the backends hold of the ticket's prompt, unless nothing changed since."""
        if ticket.version == self.index.version:
            return
        ticket.version = self.index.version
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
        gates = {backend.name: self.admission.gate(backend, load.now) for backend in allowed}
        fits = self.admission.fitting(ticket, [b for b in allowed if gates[b.name] is Gate.OPEN])
        return tuple(
            Candidate(
                b.name,
                gates[b.name],
                ticket.matched(b.name),
                ticket.uncached(b.name),
                round(b.left(load.now, load.rate)),
                b.running,
                max(0.0, b.debt(load.now)),
                price(ticket, b, load) if b in fits else None,
            )
            for b in allowed
        )

    def statistics(self, now: float) -> dict[str, BackendStatistics]:
        """Every backend's counters."""
        return {
            name: BackendStatistics(
                self.admission.gate(b, now), b.running, b.in_flight, max(0.0, b.debt(now)), b.kv, b.accuracy.value
            )
            for name, b in self.backends.items()
        }

    @property
    def known_rate(self) -> float:
        """The prefill rate once it was learned, infinity before: nobody is refused on a guess."""
        return self.rate.value if self.rate.samples >= self.rules.rate_samples else inf

    def paid(self, backend: Backend, now: float) -> bool:
        """Whether a backend that was last seen in debt is not any more; True once."""
        if backend in self.indebted and backend.debt(now) <= 0.0:
            self.indebted.remove(backend)
            return True
        return False

    def timed(self, slot: Slot, now: float) -> None:
        """The prefill of `slot` was seen to end now: learn from how long it took."""
        backend = slot.backend
        if (seconds := now - backend.began) > 0.0:
            self.rate.add(slot.uncached, seconds * backend.view.speed)

    def learn(self, slot: Slot, ending: Ending, usage: Usage | None) -> None:
        """`slot` has ended: compare what its backend had cached with what was expected."""
        if ending is Ending.SUCCESS and usage is not None and usage.cached is not None and slot.matched:
            slot.backend.accuracy.add(min(usage.cached, slot.matched), slot.matched)
            slot.backend.trust = slot.backend.accuracy.value
            self.trust = sum(b.trust for b in self.backends.values()) / max(1, len(self.backends))
