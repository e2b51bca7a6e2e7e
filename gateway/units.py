"""Human quantities: `1h30m`, `64MiB`, `200k`, `10%` as plain numbers, and back.

A text must say its unit; a number that comes from Python is taken to be in the base unit already (seconds,
bytes, 0..1). What `show_*` writes, the parser reads back to the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

_NUMBER = r"\d{1,15}(?:\.\d{1,30})?"
_AMOUNT = re.compile(rf"({_NUMBER}) ?([A-Za-z%]*)", re.ASCII)
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|[smhd]))+", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|[smhd])", re.ASCII)  # ms before m: 5ms is not 5m and a stray s

_SECONDS = {"d": Decimal(86400), "h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
_COUNTS = {"G": 10**9, "M": 10**6, "k": 10**3, "": 1}

A_DURATION = "a duration has a unit, such as 500ms, 2s, 10m or 1h30m"
A_SIZE = "a size has a unit, such as 512B, 64KB or 1MiB"
A_COUNT = "a count is a whole number, such as 64, 200k or 1.5M"
A_SHARE = "a share lies between 0% and 100%, such as 10% or 0.1"
A_NUMBER = "a number was expected, such as 2 or 0.5"
AN_INSTANT = "a date or a time was expected, such as 2027-01-31 or 2027-01-31T18:00:00Z"

LONGEST_S = 366 * 86400  # a clock longer than a year is a slip of the pen
LARGEST = 10**15  # beyond this a float no longer holds every whole number


def quoted(value: object) -> str:
    """What was read, as an error may repeat it: escaped, not long (it may be a key), without credentials (`@`)."""
    if isinstance(value, dict | list):
        return "keys" if isinstance(value, dict) else "a list"
    if not isinstance(value, str):
        return repr(value)
    return f"a text of {len(value)} characters" if len(value) > 32 or "@" in value else repr(value)


def _refused(value: object, expected: str) -> ValueError:
    return ValueError(f"read {quoted(value)}: {expected}")


def _amount(value: object, units: dict[str, int], expected: str) -> int:
    found = _AMOUNT.fullmatch(str(value))
    scale = found and {unit.lower(): scale for unit, scale in units.items()}.get(found[2].lower())
    if not found or not scale:
        raise _refused(value, expected)
    whole = Decimal(found[1]) * scale
    if whole != int(whole) or whole > LARGEST:
        raise _refused(value, expected)
    return int(whole)


def seconds(value: object) -> float:
    """`500ms`, `2s`, `10m`, `1h30m`, `1d` in seconds; at most a year."""
    if isinstance(value, int | float):
        return float(value)
    if not _DURATION.fullmatch(str(value)):
        raise _refused(value, A_DURATION)
    total = sum(Decimal(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(str(value)))
    if total > LONGEST_S:
        raise _refused(value, "no clock may be longer than a year")
    return float(total)


def size(value: object) -> int:
    """`512B`, `64KB` (thousands), `1MiB` (powers of 1024) in bytes; upper and lower case alike."""
    return value if isinstance(value, int) else _amount(value, _BYTES, A_SIZE)


def count(value: object) -> int:
    """`64`, `200k`, `1.5M`, `2G` as a whole number."""
    if str(value).endswith("m"):
        raise _refused(value, "millions are written with a capital M, such as 1.5M")
    return value if isinstance(value, int) else _amount(value, _COUNTS, A_COUNT)


def share(value: object) -> float:
    """`10%` or `0.1` as a number from 0 to 1."""
    found = _AMOUNT.fullmatch(str(value))
    if not found or found[2] not in ("", "%"):
        raise _refused(value, A_SHARE)
    part = Decimal(found[1]) / (100 if found[2] else 1)
    if part > 1:
        hint = f"; did you mean {value}%?" if not found[2] and part <= 100 else ""
        raise _refused(value, A_SHARE + hint)
    return float(part)


def number(value: object) -> float:
    """`2` or `0.5`: neither negative nor infinite."""
    if not re.fullmatch(rf"{_NUMBER}(?:e[+-]?\d\d?)?", str(value), re.ASCII | re.IGNORECASE):
        raise _refused(value, A_NUMBER)
    return float(str(value))


def instant(value: object) -> datetime:
    """`2027-01-31` (its first moment) or `2027-01-31T18:00:00+01:00`; UTC unless it says otherwise."""
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        moment.astimezone(UTC)  # as it will be shown: the last day of 9999 may end in a year that has no date
    except (ValueError, OverflowError):
        raise _refused(value, AN_INSTANT) from None
    return moment


def flag(value: object) -> bool:
    """`true` or `false`."""
    if isinstance(value, bool):
        return value
    if str(value).lower() not in ("true", "false"):
        raise _refused(value, "true or false was expected")
    return str(value).lower() == "true"


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_seconds(value: float) -> str:
    """5400.0 as `1h30m`, 0.0005 as `0.5ms`."""
    rest, text = Decimal(repr(value)), ""
    for unit in ("d", "h", "m", "s"):
        whole = int(rest // _SECONDS[unit])
        text += f"{whole}{unit}" if whole else ""
        rest -= whole * _SECONDS[unit]
    return text + (f"{_plain(rest * 1000)}ms" if rest else "") or "0s"


def _show_whole(value: int, units: dict[str, int]) -> str:
    unit = next(unit for unit, scale in units.items() if (value or scale == 1) and value % scale == 0)
    return f"{value // units[unit]}{unit}"


def show_size(value: int) -> str:
    """67108864 as `64MiB`, 64000 as `64KB`: the largest unit that divides it."""
    return _show_whole(value, _BYTES)


def show_count(value: int) -> int | str:
    """200000 as `200k`; a number where no unit makes it shorter."""
    return value if value < 10_000 or value % 1000 else _show_whole(value, _COUNTS)


def show_share(value: float) -> str:
    """0.1 as `10%`."""
    return f"{_plain(Decimal(repr(value)) * 100)}%"


def _shown(show: Callable[[Any], int | str]) -> PlainSerializer:
    return PlainSerializer(show, when_used="json")


Seconds = Annotated[float, BeforeValidator(seconds), _shown(show_seconds)]
Bytes = Annotated[int, BeforeValidator(size), _shown(show_size)]
Count = Annotated[int, BeforeValidator(count), _shown(show_count)]
Share = Annotated[float, BeforeValidator(share), _shown(show_share)]
Number = Annotated[float, BeforeValidator(number)]
Flag = Annotated[bool, BeforeValidator(flag)]
Instant = Annotated[datetime, BeforeValidator(instant)]
