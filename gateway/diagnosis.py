"""From facts to a report: what is known, what is not, what may be wrong, and what to try. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gateway.experiments import ADVICE, Experiment
from gateway.facts import Facts
from gateway.hypotheses import FEW, Hypothesis, hypotheses

KEPT = 0.95  # an objective that fewer requests keep is missed, whatever the hypotheses
TRIED = 6  # experiments that are told
LATER = 0.8  # each further experiment for the same hypothesis is worth so much of the one before


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`experiments` come with the name of the hypothesis that they test, the most promising first."""

    facts: Facts
    missing: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    experiments: tuple[tuple[str, Experiment], ...]

    @property
    def conclusion(self) -> str:
        """In one sentence, what it comes to: that all is well only where there was enough to tell it from."""
        facts = self.facts
        if self.hypotheses:
            return f"{ADVICE[self.hypotheses[0].name].title} [{self.hypotheses[0].word}]."
        if not facts.requests:
            return "None: no request ended in this time, so there is nothing to judge."
        if facts.requests < FEW:
            return f"None, but {facts.requests:.0f} requests are too few to call it healthy."
        kept = [each.share for each in facts.objectives if each.share is not None and each.name != "availability"]
        if not kept:
            return "None; without objectives that apply (models.NAME.slo) no request counts as slow."
        if min(kept) < KEPT:
            return "None: objectives are missed (see 2.), but nothing in these numbers says why."
        return "None. This looks healthy: objectives are kept, and nothing in these numbers points anywhere."

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        facts = asdict(self.facts)
        del facts["objectives"]
        objectives = [asdict(each) | {"kept": each.share} for each in self.facts.objectives]
        return {
            "facts": facts | {"goodput": self.facts.goodput},
            "missing": list(self.missing),
            "conclusion": self.conclusion,
            "objectives": objectives,
            "hypotheses": [
                asdict(each)
                | {"strength": each.word, "title": ADVICE[each.name].title}
                | {"confirm": ADVICE[each.name].confirm, "refute": ADVICE[each.name].refute}
                for each in self.hypotheses
            ],
            "experiments": [{"hypothesis": name} | asdict(each) for name, each in self.experiments],
        }


def diagnosis(facts: Facts) -> Diagnosis:
    """What the facts come to."""
    found = hypotheses(facts)
    worth = [
        (each.score * LATER**number, each.name, experiment)
        for each in found
        for number, experiment in enumerate(ADVICE[each.name].experiments)
    ]
    best = sorted(worth, key=lambda each: -each[0])[:TRIED]
    return Diagnosis(facts, tuple(missing(facts)), tuple(found), tuple((name, each) for _, name, each in best))


def missing(facts: Facts) -> list[str]:
    """What would have to be known to say more."""
    answered = facts.requests > 0  # of engines that were not asked it is not known what they report
    reasons = {
        f"Requests: {facts.requests:.0f} in {facts.seconds:.0f} s; below {FEW} nothing is told with confidence. "
        "Look again under load, or over a longer --window.": facts.requests < FEW,
        "History: nothing is stored of the beginning of this time: rates a second are too low. A shorter --window "
        "tells them as they are.": not facts.whole,
        "Objectives: no model has any (models.NAME.slo); what is late or slow is then nobody's to say.": not any(
            each.name in ("ttft", "itl") for each in facts.objectives
        ),
        "First tokens: no streams ended in the window; whole answers do not show where their time went.": (
            answered and facts.ttft_s["p50"] is None
        ),
        "Lengths: engines report no usage, so tokens per request are not known.": (
            answered and facts.prompt_tokens is None
        ),
        "Caches: engines do not report cached tokens, so whether prefixes are found is not known.": (
            answered and facts.cached_share is None
        ),
        "Engines: none of their own metrics is read (pools.NAME.engine, signals), so KV memory and what waits inside "
        "them is not known.": facts.kv_share is None and facts.engine_running is None,
        "Engines: their metrics are old; see headrace_signal_age_seconds.": (facts.signal_age_s or 0.0) > 30,
        "The gateway: it tells nothing of its event loop.": facts.loop_lag_s is None,
    }
    always = "Accelerators: their use is not seen from here; see the exporter of their maker (DCGM)."
    return [*(text for text, lacks in reasons.items() if lacks), always]
