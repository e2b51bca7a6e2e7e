"""Prometheus and promtool, where they are: under .cache (`make prometheus`) or on the path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHED = ROOT / ".cache" / "prometheus" / "usr" / "bin"
NEEDED = bool(os.environ.get("HEADRACE_OBSERVABILITY"))  # set by `make test-observability`: then nothing is left out


def tool(name: str) -> str:
    """The path of a program; without it the test is skipped, or fails where it is needed."""
    found = shutil.which(name, path=f"{CACHED}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        assert not NEEDED, f"{name} is not there: make prometheus"
        pytest.skip(f"needs {name}: make prometheus")
    return found
