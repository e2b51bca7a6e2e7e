"""A module imports only from lower floors, never from its own (docs: ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# One line a floor, the ground first.
PLAN = """
policies: types rules verdicts
policies: limits estimate prefix retry health shares rollout wakeup
policies: backend leases
policies: lanes admission routing unseen
policies: queues
policies: pool waiting
policies: choice forecast running
policies: scheduler
gateway: units problem inflate envelope multipart frames usage processes metrics stores resp tracecontext descriptors
gateway: samples summed
gateway: secret section address yamlfile http1 link exposition redislink vitals facts experiments limitmetrics
gateway: poolschema rolloutschema hypotheses
gateway: schema errors backend catalog sharedaccount signals discovery diagnosis
gateway: consistency exchange isolation sharedstore eligible blame doors
gateway: config wire answers dialects reply timeline waking
gateway: reading oneshotmetrics turn jobs pool given errand requestlog spans recent feed page
gateway: sse auth upstream dispatch connection requestmetrics quota watch lateness tracing versions poolmetrics
gateway: relay telemetry logs generation ledger roster hedge
gateway: fleetmetrics
gateway: fleet
gateway: fleetadmin
gateway: client assembly entitled models reload overview
gateway: pulse
gateway: board
gateway: gathered guard
gateway: admin rest shadows
gateway: proxy
gateway: app
gateway: serve
gateway: worker
gateway: orders
gateway: workers
gateway: crewadmin
gateway: supervise
loadtests: kvcache profiles tracefile scrape
loadtests: batch scenario traces
loadtests: engine workload
loadtests: fleet results router
loadtests: gateways immediate simulation
loadtests: queued
loadtests: baselines
loadtests: simulate
loadtests: experiments goals
loadtests: machine origin scoreboard prose httpd gauges llamacpp untold
loadtests: loadgen asks live
loadtests: peers speech replayed
loadtests: phases dialects.shape
loadtests: dialects.chat dialects.messages dialects.responses taps generation
loadtests: faults oneshot
loadtests: emulator replay report overhead
loadtests: capacity decision crowd faultrelay judgement nameserver trickle valkey
loadtests: lag rollout stage
loadtests: storm
loadtests: outage
loadtests: chaos
gateway: demo emulate keys logview output topview
gateway: adminport
gateway: tenants backends top doctor canary
gateway: cli
"""
FLOORS = [[f"{package}.{name}" for name in names.split()] for package, names in re.findall(r"(\w+): (.+)", PLAN)]
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


def test_patterns_have_no_possessive_groups() -> None:
    """Python 3.11.2, Debian 12's, matches wrongly what a possessive group follows; single characters are safe."""
    possessive = re.compile(r"r?b?r?['\"].*\)[?*+]\+")
    found = [
        str(path) for package in PACKAGES for path in Path(package).rglob("*.py") if possessive.search(path.read_text())
    ]
    assert found == []
