"""Which backends of a pool may be trusted with work: from the endings of requests, from probes, and from `now`.

Endings cost nothing, come at once, and see what a health endpoint does not (an engine that is dead behind a live
server); probes see a backend that gets no requests. A backend takes work if neither speaks against it:

    probes      NEW   -- `healthy_after` good -->  UP     a failed probe of a NEW one makes it DOWN
                UP    -- `unhealthy_after` bad -->  DOWN
                DOWN  -- `healthy_after` good -->  UP
    endings     fine     -- failures -->  ejected, until a time
                ejected  -- the time has come -->  on trial: one request
                trial    -- good -->  fine     trial  -- bad -->  ejected, for longer

Ejection after Envoy's outlier detection, with its cap: at most half of a pool is ejected on the word of endings, since
what fails everywhere is more likely the requests' doing. Who deserves it beyond that rests for a moment after each
failure, and is asked only if nobody else is there; but if every backend that is left deserves it, all are out, and who
asks is told so at once. A score of failures fades with requests and with time (an exponential mean), so that a
rate ejects and a single failure never does; refused connections count by themselves, two in a row. How long: twice as
long each time, no longer than `longest_s` unless the attempt itself took longer, because a trial costs a request.
A backend that comes back is cold: what it may run grows with the tokens that it has served (slow start).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

from policies.verdicts import Found, HealthRules, State, Verdict


@dataclass(slots=True)
class Record:
    """What is known of one backend."""

    probed: bool | None = None  # the verdict of the probes; None: none yet
    good: int = 0  # probes in a row
    bad: int = 0
    silent: bool = False  # the last bad one was no answer at all
    score: float = 0.0
    scored_at: float = -inf
    refusals: int = 0
    ejected_until: float | None = None
    refused: bool = False  # what it was ejected for: good probes refute it
    ejections: int = 0
    suspect: bool = False  # would be ejected, if there were not so many already
    trial: bool = False  # the request that decides is on its way
    rests_until: float = -inf
    ramp_from: float | None = None
    ramp_tokens: int = 0
    returned_at: float = -inf

    def acquit(self) -> None:
        """No ending speaks against it any more."""
        self.ejected_until = None
        self.trial = self.suspect = self.refused = False
        self.score, self.scored_at, self.refusals = 0.0, -inf, 0


class Health:
    """The backends of one pool. What changes a record returns whether verdicts may have changed with it."""

    def __init__(self, rules: HealthRules | None = None) -> None:
        self.rules = rules or HealthRules()
        self.records: dict[str, Record] = {}

    def __repr__(self) -> str:
        states = Counter(self.state(name, inf).value for name in self.records)
        return f"<Health {dict(states)}>"

    # What happens.

    def configure(self, rules: HealthRules, *, probed: bool) -> None:
        """These rules hold from now on. A witness that is not asked any more has said nothing: who was out on its word
        alone is back."""
        self.rules = rules
        for record in self.records.values():
            if not probed:
                record.probed = True
            if not rules.eject:
                record.acquit()

    def enter(self, name: str, now: float, *, probed: bool, cold: bool) -> None:
        """A backend is there. `probed`: probes will tell of it, so nothing is sent until they have; `cold`: it starts
        slowly."""
        record = self.records[name] = Record(None if probed else True)
        if cold and not probed:
            record.ramp_from = now
        record.returned_at = now if cold else -inf

    def leave(self, name: str) -> None:
        """It is gone, and everything about it forgotten."""
        self.records.pop(name, None)

    def started(self, name: str, now: float) -> bool:
        """A request was sent there. Returns whether it is the one that decides."""
        record = self.records.get(name)
        if record is None or record.ejected_until is None or record.trial or now < record.ejected_until:
            return False
        record.trial = True
        return True

    def ended(
        self,
        name: str,
        found: Found | None,
        now: float,
        *,
        trial: bool = False,
        cost_s: float = 0.0,
        tokens: int = 0,
    ) -> bool:
        """An attempt there is over, or is known to be late; None tells nothing. `trial`: what `started` said of it;
        `cost_s` is how long it took, `tokens` how many were served."""
        record = self.records.get(name)
        if record is None:
            return False
        if record.ejected_until is not None:
            return trial and record.trial and self._tried(record, found, now, cost_s)
        if found is Found.GOOD:
            record.refusals = 0
            record.ramp_tokens += tokens
            if record.scored_at == -inf and not record.suspect:
                return False  # the way of nearly every request
        if found is None or not self.rules.eject:
            return False
        self._score(record, found, now)
        if record.score < self.rules.limit and record.refusals < self.rules.refusals:
            record.suspect = False
            return False
        return self._accuse(record, now, cost_s)

    def probed(self, name: str, good: bool, now: float, *, silent: bool = False) -> bool:
        """A probe has come back, or has not (`silent`)."""
        record, rules = self.records.get(name), self.rules
        if record is None:
            return False
        record.good, record.bad = (record.good + 1, 0) if good else (0, record.bad + 1)
        record.silent = record.silent if good else silent
        if good and record.good >= rules.healthy_after:
            refuted = record.refused and record.ejected_until is not None
            if refuted:
                self._return(record, now)
            if record.probed:
                return refuted
            if record.ejected_until is None and (record.probed is False or record.returned_at > -inf):
                self._return(record, now)
            record.probed = True
            return True
        if not good and record.probed is not False and (record.probed is None or record.bad >= rules.unhealthy_after):
            record.probed = False
            return True
        return False

    def restarted(self, name: str, now: float) -> bool:
        """It is another process than before, which has done nothing wrong and holds nothing."""
        record = self.records.get(name)
        if record is None:
            return False
        self._return(record, now)
        record.rests_until = -inf
        return True

    def rest(self, name: str, until: float) -> bool:
        """It asked to be left alone. A later word replaces an earlier one only by a later time."""
        record = self.records.get(name)
        if record is None or until <= record.rests_until:
            return False
        record.rests_until = until
        return True

    # What follows.

    def state(self, name: str, now: float) -> State:
        """Of one backend."""
        record = self.records[name]
        if record.probed is False:
            return State.DOWN
        if record.ejected_until is not None:
            return State.EJECTED if now < record.ejected_until else State.TRIAL
        if now < record.rests_until:
            return State.RESTING
        return State.NEW if record.probed is None else State.UP

    def verdicts(self, now: float, shut: Collection[str] = ()) -> dict[str, Verdict]:
        """Of every backend. Those that are only not known yet, or rest, take work if nobody better does: nobody who is
        `shut` does, such as one that is drained. When nobody does because several fell silent, that is more likely our
        own network or machine: they take work, too."""
        records = self.records
        states = {name: self.state(name, now) for name in records}
        serving = any(state is State.UP and name not in shut for name, state in states.items())
        found = {name: self._verdict(records[name], state, serving, now) for name, state in states.items()}
        mute = [name for name, state in states.items() if state is State.DOWN and records[name].silent]
        if len(mute) > 1 and not any(verdict.open and name not in shut for name, verdict in found.items()):
            found |= {name: Verdict(State.DOWN, True) for name in mute}
        return found

    def suspicious(self, name: str) -> bool:
        """Whether the backend, and not the request, is the likely cause of a failure there: it is on trial, or others
        failed before."""
        record = self.records.get(name)
        return record is not None and (record.ejected_until is not None or record.score > self.rules.weight)

    def next_change(self, now: float) -> float:
        """When verdicts change if nothing else happens; infinite: never."""
        return min((at for record in self.records.values() for at in self._changes(record) if at > now), default=inf)

    def _verdict(self, record: Record, state: State, serving: bool, now: float) -> Verdict:
        if state is State.TRIAL:
            return Verdict(state, not record.trial, 1)
        opens = state is State.UP or (state in (State.NEW, State.RESTING) and not serving)
        return Verdict(state, opens, self._room(record, now))

    def _room(self, record: Record, now: float) -> int | None:
        if record.ramp_from is None or now >= record.ramp_from + self.rules.ramp_s:
            return None
        return self.rules.ramp_requests + record.ramp_tokens // self.rules.ramp_tokens

    def _changes(self, record: Record) -> Iterator[float]:
        yield record.rests_until
        if record.ejected_until is not None:
            yield record.ejected_until
        if record.ramp_from is not None:
            yield record.ramp_from + self.rules.ramp_s

    def _score(self, record: Record, found: Found, now: float) -> None:
        faded = 0.5 ** ((now - record.scored_at) / self.rules.fade_s) if record.scored_at > -inf else 0.0
        bad = 0.0 if found is Found.GOOD else 1.0
        record.score = record.score * faded
        record.score += self.rules.weight * (bad - record.score)
        record.scored_at = now if record.score > 0.01 else -inf
        record.refusals += found is Found.REFUSED

    def _tried(self, record: Record, found: Found | None, now: float, cost_s: float) -> bool:
        """The request that decides is over; if it tells nothing, the next one decides."""
        record.trial = False
        if found is Found.GOOD:
            self._return(record, now)
        elif found is not None:
            self._eject(record, now, cost_s, refused=found is Found.REFUSED)
        return True

    def _accuse(self, record: Record, now: float, cost_s: float) -> bool:
        """Eject it, or let it rest if that would be more than half; all of them, if there is nobody left to spare. The
        only one is out when nobody is there, but not for its faults: they tell clients more than that it is out
        would."""
        record.suspect = True
        records = self.records.values()
        if len(records) == 1 and record.refusals < self.rules.refusals:
            return False
        out = sum(1 for each in records if each.probed is False or each.ejected_until is not None)
        if out + 1 <= len(self.records) // 2:
            self._eject(record, now, cost_s, refused=record.refusals >= self.rules.refusals)
            return True
        if not all(each.suspect or each.probed is False or each.ejected_until is not None for each in records):
            record.rests_until = max(record.rests_until, now + self.rules.first_s)
            return True
        for each in records:
            if each.suspect and each.ejected_until is None:
                self._eject(each, now, cost_s, refused=each.refusals >= self.rules.refusals)
        return True

    def _eject(self, record: Record, now: float, cost_s: float, *, refused: bool) -> None:
        rules = self.rules
        if now - record.returned_at > rules.forget_s and record.ejected_until is None:
            record.ejections = 0
        grown = min(rules.longest_s, rules.first_s * 2.0 ** min(record.ejections, 30))
        lasts = min(rules.worst_s, max(grown, rules.worth * cost_s))
        record.ejections += 1
        record.ejected_until = max(now + lasts, record.ejected_until or 0.0)
        record.refused = refused
        record.good = 0
        record.suspect = False

    def _return(self, record: Record, now: float) -> None:
        record.acquit()
        record.ramp_from, record.ramp_tokens = now, 0
        record.returned_at = now
