"""What a run was held to: one line per promise, with the limit, what was reached, and whether that is good enough."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WIDTH = 110  # where nobody looks
LOOK_S = 0.5
SHOWN = 5  # examples of what must not be


@dataclass(frozen=True, slots=True)
class Line:
    """`met` None: it only tells. `why`: examples, or the reason why nothing was judged."""

    what: str
    reached: str
    value: float
    limit: str = ""
    met: bool | None = None
    why: str = ""

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.met]


@dataclass
class Judgement:
    """Of one run. A judgement with a line that was missed makes an exit code of 1."""

    title: str
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for machines: what is not a line

    def __getitem__(self, what: str) -> Line:
        return next(line for line in self.lines if line.what == what)

    @property
    def missed(self) -> list[str]:
        return [line.what for line in self.lines if line.met is False]

    def tell(self, what: str, reached: object, why: str = "") -> None:
        """It is only said."""
        value = float(reached) if isinstance(reached, int | float) else 0.0
        self.lines.append(Line(what, shown(reached), value, why=why))

    def below(self, what: str, value: float, limit: float, unit: str = "", *, judged: bool = True) -> None:
        """It must stay below; unless too little was seen to tell."""
        met = value < limit if judged else None
        why = "" if judged else "too short a run to tell"
        self.lines.append(Line(what, written(value, unit), value, f"< {written(limit, unit)}", met, why))

    def at_most(self, what: str, value: float, limit: float, unit: str = "", why: str = "") -> None:
        self.lines.append(
            Line(what, written(value, unit), value, f"<= {written(limit, unit)}", value <= limit, why if value else "")
        )

    def none(self, what: str, found: Sequence[object]) -> None:
        """There must not be any."""
        examples = Counter(map(str, found)).most_common(SHOWN)
        why = "; ".join(f"{count} x {text}" if count > 1 else text for text, count in examples)
        self.lines.append(Line(what, str(len(found)), len(found), "0", not found, why))

    def show(self, console: Console) -> None:
        """A table for people."""
        table = Table(box=box.SIMPLE_HEAD, title=self.title, title_justify="left", title_style="bold")
        for name, justify in (("", "left"), ("limit", "right"), ("reached", "right"), ("", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for line in self.lines:
            style = "bold red" if line.met is False else "green" if line.met else ""
            table.add_row(line.what, line.limit, line.reached, Text(line.verdict, style))
        console.print(table)
        for line in self.lines:
            if line.why:
                console.print(f"  {line.what}: {line.why}", style="red" if line.met is False else "dim", markup=False)

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {"run": self.title, "met": not self.missed, "lines": [asdict(line) for line in self.lines]} | self.facts


def written(value: float, unit: str) -> str:
    """A share as a percentage, a ratio with its sign, a duration in what suits it."""
    match unit:
        case "+%":
            return f"{value:+.2%}"
        case "%":
            return f"{value:.2%}"
        case "x":
            return f"x{value:.3f}"
        case "s":
            return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"
        case _:
            return f"{value:g} {unit}".strip()


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def at_share(values: Sequence[float], share: float) -> float:
    """The value that so many are not above; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def deliver(judgements: Iterable[Judgement], *, as_json: bool) -> int:
    """Show them all on stdout. Returns the exit code."""
    judgements = list(judgements)
    if as_json:
        print(json.dumps([each.document() for each in judgements], indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        for each in judgements:
            each.show(console)
    return 1 if any(each.missed for each in judgements) else 0


@asynccontextmanager
async def progress(title: str, seconds: float) -> AsyncIterator[None]:
    """A bar on stderr while something runs that takes about so long."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task(title, total=seconds)

        async def move() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                bar.update(task, advance=LOOK_S, refresh=True)

        moving = asyncio.create_task(move())
        try:
            yield
        finally:
            moving.cancel()
