"""Who gets a new version, always the same ones, and how it compares with the version that it would replace."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import exp, inf, log, sqrt

Z = 1.959964  # 95 %, two-sided
FEWEST = 5  # values on each side below which nothing is said of their spread
SHORTEST_S = 1e-6  # times have logarithms


def seed(secret: bytes, model: str) -> bytes:
    """32 bytes that key `place` for one model: two models' canaries fall on different callers."""
    raw = model.encode()
    return blake2b(len(raw).to_bytes(8, "big") + raw, digest_size=32, key=secret[:64], person=b"hr-canary").digest()


def place(seed: bytes, *who: bytes) -> float:
    """Where somebody stands between 0 and 1 (excluded): evenly spread, the same everywhere and for ever, and not to be
    chosen by who does not know the seed. Whoever stands below the weight gets the new version, so that a weight that
    grows takes nobody out. The fields are length-prefixed."""
    mac = blake2b(digest_size=8, key=seed)
    for field in who:
        mac.update(len(field).to_bytes(8, "big") + field)
    return (int.from_bytes(mac.digest(), "big") >> 11) / 2**53  # as many bits as a float has


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    estimate: float
    low: float
    high: float


class Times:
    """Times in seconds, summed up by their logarithms (Welford's algorithm): they are skewed, their logarithms hardly.
    None of them is kept."""

    __slots__ = ("count", "mean", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0  # of the logarithms
        self.squares = 0.0  # of their distances from it, summed

    def __repr__(self) -> str:
        return f"<Times {self.count} around {self.typical_s or 0.0:.3f} s>"

    def add(self, seconds: float) -> None:
        """One more."""
        value = log(max(SHORTEST_S, seconds))
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)

    @property
    def typical_s(self) -> float | None:
        """Their geometric mean, which is near the median; None of none."""
        return exp(self.mean) if self.count else None

    @property
    def error(self) -> float:
        """The variance of the mean logarithm; of two at least."""
        return self.squares / (self.count - 1) / self.count


def share(part: int, of: int) -> Interval:
    """A share of `of` trials, by Wilson's score interval (1927); anything between 0 and 1 where there were none."""
    if not of:
        return Interval(0.0, 0.0, 1.0)
    found, bend = part / of, Z * Z / of
    centre = (found + bend / 2) / (1 + bend)
    reach = Z * sqrt(found * (1 - found) / of + bend / of / 4) / (1 + bend)
    return Interval(found, max(0.0, min(found, centre - reach)), min(1.0, max(found, centre + reach)))


def excess(new: tuple[int, int], old: tuple[int, int]) -> Interval | None:
    """The share of the new, each given as part and whole, minus that of the old (Newcombe 1998, method 10, right for
    small numbers and for none, too). None where one has no trials."""
    if not new[1] or not old[1]:
        return None
    a, b = share(*new), share(*old)
    found = a.estimate - b.estimate
    low = found - sqrt((a.estimate - a.low) ** 2 + (b.high - b.estimate) ** 2)
    high = found + sqrt((a.high - a.estimate) ** 2 + (b.estimate - b.low) ** 2)
    return Interval(found, low, high)


def ratio(new: Times, old: Times) -> Interval | None:
    """How many times as long the new takes, by the geometric means; the interval is Welch's (1947), of the logarithms.
    None where there are too few on one side."""
    if min(new.count, old.count) < FEWEST:
        return None
    found, error = new.mean - old.mean, new.error + old.error
    reach = _quantile(_freedom(new, old, error)) * sqrt(error)
    return Interval(exp(found), exp(found - reach), exp(found + reach))


def _freedom(new: Times, old: Times, error: float) -> float:
    spread = new.error**2 / (new.count - 1) + old.error**2 / (old.count - 1)
    return error * error / spread if spread else inf


def _quantile(freedom: float) -> float:
    """Student's t at 97.5 %, by the first terms of its expansion around the normal (Abramowitz & Stegun 26.7.5): within
    1 % from 4 degrees of freedom on."""
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
