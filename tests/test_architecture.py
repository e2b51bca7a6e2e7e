"""ARCHITECTURE.md shows the code as it is. `python -m tests.test_architecture` renews what is read from it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from gateway import proxy
from tests.test_floors import FLOORS, ROOT

PAGE = ROOT / "ARCHITECTURE.md"
PATH = re.compile(r"(?<=```python\n).*?(?=```\n)", re.DOTALL)
LIST = re.compile(r"(?<=\nabove\):\n).*?(?=\n## Tests\n)", re.DOTALL)


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = re.split(r"(?<=[.!?])\s", " ".join(said.split("\n\n")[0].split()))[0]
    return first.rstrip(".:").replace("|", "\\|")


def modules() -> str:
    """A row for each module, from the ground up."""
    rows = ["", "| floor | module | what it is for |", "|---:|---|---|"]
    for number, floor in enumerate(FLOORS):
        for module in floor:
            path = ROOT / (module.replace(".", "/") + ".py")
            if path.exists():
                rows.append(f"| {number} | `{path.relative_to(ROOT)}` | {purpose(path)} |")
    return "\n".join(rows) + "\n"


def path() -> str:
    """Of every request, and of each of its attempts."""
    return "\n\n".join(map(inspect.getsource, (proxy.proxy, proxy.attempt)))


def renewed(page: str) -> str:
    page = PATH.sub(lambda _: path(), page, count=1)
    return LIST.sub(lambda _: modules(), page, count=1)


def test_the_page_shows_the_code_as_it_is() -> None:
    """The path, and every module on its floor. If this fails: python -m tests.test_architecture"""
    page = PAGE.read_text()
    assert page == renewed(page)


def test_the_path_is_one_screen() -> None:
    """It can be read without scrolling."""
    assert len(path().splitlines()) <= 40


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
