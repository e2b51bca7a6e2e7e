"""What is learned online: rates, ratios and lengths, each forgetting its past at a stated pace."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


class Ratio:
    """A ratio of two sums that forget: each new pair weighs 1, the one before `keep`, and so on.

    Summing before dividing weighs samples by their size, so that many tiny ones do not drown a large one.
    The prior is a pair like any other and fades as samples come.
    """

    __slots__ = ("_bottom", "_keep", "_top", "samples")

    def __init__(self, top: float, bottom: float, keep: float) -> None:
        self._top = top
        self._bottom = bottom
        self._keep = keep
        self.samples = 0

    def add(self, top: float, bottom: float) -> None:
        """Learn one pair."""
        self._top = self._top * self._keep + top
        self._bottom = self._bottom * self._keep + bottom
        self.samples += 1

    @property
    def value(self) -> float:
        """The ratio as it stands."""
        return self._top / self._bottom

    def __repr__(self) -> str:
        return f"<Ratio {self.value:.4g} of {self.samples}>"


class Prefills:
    """What a prefill takes per uncached token, as a line in its mean context: each token attends to all before it.

    Least squares on the whole prefill, so that the fixed cost of a step, of which short prompts bring many, does not
    tilt the line. Pairs forget like a `Ratio`'s; the prior is a flat line, worth one prefill of `prior_tokens`. Of the
    slope a part of the prior stays for good (ridge): else short prompts alone would tell of long ones.
    """

    CONTEXT = 20_000.0  # tokens: a context from which a slope can be told

    __slots__ = ("_calm", "_keep", "_sums", "flat", "samples", "slope")

    def __init__(self, prior: float, prior_tokens: float, keep: float) -> None:
        self._keep = keep
        weight = prior_tokens * prior_tokens
        self._calm = weight * self.CONTEXT * self.CONTEXT
        # of weight, weight x context, weight x context^2, weight x seconds per token, that x context
        self._sums = (weight, 0.0, 0.0, weight * prior, 0.0)
        self.flat = prior
        self.slope = 0.0
        self.samples = 0

    def add(self, tokens: int, context: float, seconds: float) -> None:
        """A prefill of `tokens` at a mean context of so many tokens took `seconds`."""
        weight, timed = float(tokens * tokens), tokens * seconds
        new = (weight, weight * context, weight * context * context, timed, timed * context)
        sums = tuple(self._keep * old + more for old, more in zip(self._sums, new, strict=True))
        one, x, xx, y, xy = self._sums = (sums[0], sums[1], sums[2], sums[3], sums[4])
        spread = one * xx - x * x + one * self._calm
        self.slope = max(0.0, (one * xy - x * y) / spread)
        self.flat = (y - self.slope * x) / one
        self.samples += 1

    def expect(self, uncached: int, whole: int) -> float:
        """Seconds for `uncached` tokens at the end of a prompt of `whole`; never negative, as the line may be for
        prompts shorter than all that were seen."""
        return max(0.0, uncached * (self.flat + self.slope * max(uncached / 2, whole - uncached / 2)))

    @property
    def rate(self) -> float:
        """Tokens per second, on the average of all tokens."""
        return self._sums[0] / self._sums[3]

    def __repr__(self) -> str:
        return f"<Prefills {self.flat * 1e6:.1f} us + {self.slope * 1e12:.0f} ps per token of context, {self.samples}>"


class Drain:
    """How many tokens per second leave the queue while there is one.

    Time without a queue does not count, nor do those who go at once: a pool that was idle for long would seem to drain
    without end. Time since the last departure does count, so that a stuck pool's rate falls.
    """

    __slots__ = ("_began", "_keep", "_seconds", "_since", "_tokens")

    def __init__(self, keep: float = 0.98) -> None:
        self._keep = keep
        self._tokens = 0.0
        self._seconds = 0.0
        self._began = 0.0
        self._since: float | None = None

    def waiting(self, now: float) -> None:
        """Somebody waits."""
        if self._since is None:
            self._since = self._began = now

    def empty(self) -> None:
        """Nobody waits any more."""
        self._since = None

    def served(self, tokens: int, now: float) -> None:
        """`tokens` left the queue for a backend."""
        if self._since is None or now <= self._began:
            return
        self._tokens = self._tokens * self._keep + tokens
        self._seconds = self._seconds * self._keep + now - self._since
        self._since = now

    def rate(self, now: float, otherwise: float) -> float:
        """Tokens per second, or `otherwise` where nothing was measured yet."""
        elapsed = self._seconds + (0.0 if self._since is None else max(0.0, now - self._since))
        return self._tokens / elapsed if self._tokens and elapsed > 0.0 else otherwise


@dataclass(slots=True)
class _Length:
    mean: float
    p90: float
    samples: int = 0


FIRST_P90 = 2.0  # times the first answer: what is seen of one says more than any prior


class OutputLengths:
    """How long answers become, per tenant and model; a key that is new leans on its model, a new model on `prior`.

    The 90th percentile is followed by stochastic approximation in steps of a share of itself, so it needs no
    samples kept. At most `capacity` keys are remembered, the least recently used go first.
    """

    KEEP = 0.98  # 50 answers: long enough for a mean of heavy-tailed lengths, short enough to follow a new release
    LEAN = 10  # answers after which a key's own mean weighs as much as its model's

    def __init__(self, prior: float = 200.0, capacity: int = 10_000) -> None:
        self._prior = prior
        self._capacity = capacity
        self._known: OrderedDict[tuple[str, str], _Length] = OrderedDict()

    def learn(self, tenant: str, model: str, output_tokens: int) -> None:
        """An answer of `output_tokens` was completed."""
        for key in (("", model), (tenant, model)):
            length = self._known.get(key)
            if length is None:
                length = self._known[key] = _Length(self._prior, 3 * self._prior)
            self._known.move_to_end(key)
            step = max(1.0 - self.KEEP, 1.0 / (length.samples + 1))
            length.mean += step * (output_tokens - length.mean)
            if not length.samples:
                length.p90 = FIRST_P90 * output_tokens
            length.p90 *= 1.0 + step * (0.9 if output_tokens > length.p90 else -0.1)
            length.p90 = max(1.0, length.p90)  # from nothing no factor leads back
            length.samples += 1
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def expected(self, tenant: str, model: str) -> float:
        """The mean length to expect, in tokens."""
        whole = self._known.get(("", model))
        lean = self._prior if whole is None else whole.mean
        own = self._known.get((tenant, model))
        return lean if own is None else (own.mean * own.samples + lean * self.LEAN) / (own.samples + self.LEAN)

    def knows(self, tenant: str, model: str) -> bool:
        """Whether any answer of this tenant, or of this model, was seen."""
        return (tenant, model) in self._known or ("", model) in self._known

    def high(self, tenant: str, model: str) -> float:
        """The length that nine answers in ten do not exceed, in tokens: what a limit should reserve."""
        length = self._known.get((tenant, model)) or self._known.get(("", model))
        return 3 * self._prior if length is None else length.p90


class BytesPerToken:
    """How many bytes of a request's prompt make a token, per model. English text and JSON start it at 4."""

    def __init__(self, prior: float = 4.0) -> None:
        self._prior = prior
        self._models: dict[str, Ratio] = {}

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """A prompt of `prompt_bytes` counted `prompt_tokens` at the engine."""
        if prompt_bytes > 0 and prompt_tokens > 0:
            if model not in self._models:
                self._models[model] = Ratio(self._prior * 1000, 1000, keep=0.995)
            self._models[model].add(prompt_bytes, prompt_tokens)

    def value(self, model: str) -> float:
        """Bytes per token."""
        known = self._models.get(model)
        return self._prior if known is None else known.value

    def tokens(self, model: str, prompt_bytes: int) -> int:
        """The tokens to expect of a prompt of so many bytes, at least one."""
        return max(1, round(prompt_bytes / self.value(model)))
