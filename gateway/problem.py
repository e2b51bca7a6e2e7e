"""What is wrong in a configuration: each finding with its place, and all of them as one error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

MAX_LINES = 500  # of a report: a file of another kind may have a problem in each of its lines

Loc = tuple[str | int, ...]
"""The keys and list indexes that lead to a value, from the top of the file."""


def shown(name: str) -> str:
    """A name from the file as a message may hold it: quoted if it has blanks or cannot be printed, and cut if long."""
    plain = re.fullmatch(r"[\w./:@+*-]{1,80}", name)
    return name if plain else json.dumps(name[:80], ensure_ascii=not name.isprintable())


def dotted(loc: Loc) -> str:
    """`pools.llama.backends[0].url`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown(part)}" for part in loc)
    return "".join(parts).removeprefix(".")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where, at which key, and what would mend it. Lines and columns count from 1."""

    source: str
    message: str
    loc: Loc = ()
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        return ": ".join(part for part in (place, dotted(self.loc), self.message) if part)


def document(problem: Problem) -> dict[str, str | int | None]:
    """The same for machines."""
    place = {"file": problem.source, "line": problem.line, "column": problem.column}
    return place | {"key": dotted(problem.loc), "message": problem.message}


class ConfigError(Exception):
    """The configuration cannot be used. Its text is the report, one problem a line, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))
        lines = [str(problem) for problem in self.problems[:MAX_LINES]]
        if len(self.problems) > MAX_LINES:
            lines.append(f"... and {len(self.problems) - MAX_LINES} more problems")
        super().__init__("\n".join(lines))


def suggestion(word: str, known: Iterable[str], kind: str) -> str:
    """`; did you mean x?`, or else all that is known: the second half of a message about an unknown word."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1)
    if close:
        return f"; did you mean {shown(close[0])}?"
    listed = ", ".join(shown(name) for name in names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; {kind}: {listed}" if names else f"; there are no {kind}"
