"""Families as Prometheus reads them: its text format, and OpenMetrics where it asks for that.

How a series begins is worked out once and kept: what is left of a scrape is putting numbers behind names. The formats:
Prometheus' exposition formats, text 0.0.4; OpenMetrics 1.0, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf

from gateway.metrics import Buckets, Family, Histogram, Key, Numbers

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def content_type(accepted: str) -> str:
    """What to answer to an Accept header."""
    return OPENMETRICS if "application/openmetrics-text" in accepted else TEXT


def exposed(families: Iterable[Family], content_type: str) -> bytes:
    """All samples, in the order given."""
    openmetrics = content_type == OPENMETRICS
    lines: list[str] = []
    for family in families:
        name = family.name.removesuffix("_total") if openmetrics and family.kind == "counter" else family.name
        text = family.text.translate(_ESCAPES) if openmetrics else family.text
        lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")
        if isinstance(family, Histogram):
            lines.extend(_distributions(family, openmetrics))
        elif isinstance(family, Numbers):
            lines.extend(_numbers(family))
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode("utf-8", "replace")


def number(value: float) -> str:
    """As both formats write it."""
    if value != value:
        return "NaN"
    return str(value) if abs(value) != inf else "+Inf" if value > 0 else "-Inf"


def _numbers(family: Numbers) -> list[str]:
    texts, values = family.texts, family.values
    if len(texts) != len(values):
        for key in values:
            if key not in texts:
                texts[key] = f"{family.name}{_braces(family, key)} "
    if family.kind == "counter":  # there are thousands, and none is infinite
        return [f"{texts[key]}{value}\n" for key, value in values.items()]
    return [f"{texts[key]}{number(value)}\n" for key, value in values.items()]


def _distributions(family: Histogram, openmetrics: bool) -> Iterator[str]:
    for key, child in family.children.items():
        begins = family.beginnings.get(key) or family.beginnings.setdefault(key, _beginnings(family, key))
        sums = list(accumulate(child.counts))
        if openmetrics and child.exemplars:
            for index, (begin, count) in enumerate(zip(begins, sums, strict=False)):
                yield f"{begin}{count}{_exemplar(child, index)}\n"
        else:
            yield from [f"{begin}{count}\n" for begin, count in zip(begins, sums, strict=False)]
        yield f"{begins[-2]}{sums[-1]}\n{begins[-1]}{child.sum}\n"


def _beginnings(family: Histogram, key: Key) -> list[str]:
    """Of the lines of one child: its classes, its count, its sum."""
    bounds = [*(number(float(bound)) for bound in family.bounds), "+Inf"]
    lines = [f"{family.name}_bucket{_braces(family, key, bound)} " for bound in bounds]
    return [*lines, f"{family.name}_count{_braces(family, key)} ", f"{family.name}_sum{_braces(family, key)} "]


def _exemplar(child: Buckets, index: int) -> str:
    if index not in child.exemplars:
        return ""
    trace_id, value, wall = child.exemplars[index]
    return f' # {{trace_id="{trace_id}"}} {value} {wall:.3f}'


def _braces(family: Family, key: Key, bound: str = "") -> str:
    pairs = [f'{label}="{value.translate(_ESCAPES)}"' for label, value in zip(family.labels, key, strict=True)]
    if bound:
        pairs.append(f'le="{bound}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""
