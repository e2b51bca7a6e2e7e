"""A module imports only from lower floors, never from its own (docs: ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    ["policies.types", "policies.rules"],
    [f"policies.{name}" for name in ["limits", "estimate", "prefix", "retry", "health"]],
    ["policies.backend"],
    [f"policies.{name}" for name in ["queues", "admission", "routing"]],
    [f"policies.{name}" for name in ["pool", "waiting"]],
    ["policies.scheduler"],
    [f"loadtests.{name}" for name in ["kvcache", "profiles", "tracefile"]],
    [f"loadtests.{name}" for name in ["batch", "scenario", "traces"]],
    [f"loadtests.{name}" for name in ["engine", "workload"]],
    [f"loadtests.{name}" for name in ["fleet", "results", "router"]],
    [f"loadtests.{name}" for name in ["gateways", "immediate", "simulation"]],
    ["loadtests.queued"],
    ["loadtests.baselines"],
    ["gateway.errors", "gateway.config", "gateway.backend", "gateway.http1", "gateway.envelope"],
    ["gateway.exchange"],
    ["gateway.wire", "gateway.sse", "gateway.telemetry", "gateway.connection", "gateway.reply"],
    [f"gateway.{name}" for name in ["client", "auth", "quota", "dispatch", "upstream", "fleet"]],
    ["gateway.proxy"],
    ["gateway.app"],
    [f"loadtests.{name}" for name in ["emulator", "simulate", "replay", "overhead", "decision"]],
    ["loadtests.experiments"],
    ["loadtests.report"],
    ["gateway.cli"],
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
PACKAGES = ("gateway", "policies", "loadtests")


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py"):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in FLOOR else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_only_from_lower_floors(module: str, path: Path) -> None:
    """The floor of a module is above the floors of all that it imports."""
    assert module in FLOOR, f"{module} has no floor: place it in FLOORS"
    for name in imports(path):
        if name.split(".")[0] in PACKAGES and name not in PACKAGES:
            assert name in FLOOR, f"{module} imports {name}, which has no floor"
            assert FLOOR[name] < FLOOR[module], f"{module} (floor {FLOOR[module]}) imports {name} ({FLOOR[name]})"


def test_policies_use_the_standard_library_only() -> None:
    """`policies` runs anywhere: no I/O, no clock, no third party but xxhash."""
    allowed = {"__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq"}
    allowed |= {"itertools", "math", "operator", "policies", "random", "statistics", "typing", "xxhash"}
    for module, path in modules():
        if module.startswith("policies."):
            for name in imports(path):
                assert name.split(".")[0] in allowed, f"{module} imports {name}"
