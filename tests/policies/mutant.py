"""`python -m tests.policies.mutant MODULE`, with OLD and NEW on standard input, a NUL between them: runs the random
worlds and the scenes of `test_scheduler` with that module of the policies changed, and fails at the first broken
promise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class Changed(SourceFileLoader):
    """Loads a module with some of its text replaced, and leaves no compiled file behind."""

    old = new = ""

    def get_data(self, path: str) -> bytes:
        return super().get_data(path).replace(self.old.encode(), self.new.encode())

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


class Changing(MetaPathFinder):
    """Finds one module for `Changed`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if spec is not None and spec.origin is not None:
            spec.loader = Changed(fullname, spec.origin)
        return spec


def main() -> None:
    Changed.old, Changed.new = sys.stdin.read().split("\0")
    sys.meta_path.insert(0, Changing(f"policies.{sys.argv[1]}"))
    from tests.policies.chance import PLANS, Chance

    for steps in (60, 150):
        for plan in PLANS:
            Chance(replace(plan, seed=plan.seed + steps)).run(steps)
        if steps == 60:
            scenes()


def scenes() -> None:
    """The rules one by one."""
    from tests.policies import test_scheduler

    for name, test in vars(test_scheduler).items():
        if name.startswith("test_"):
            test()


if __name__ == "__main__":
    main()
