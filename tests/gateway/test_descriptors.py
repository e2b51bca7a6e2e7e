"""Room for connections, within what the system allows."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from gateway.descriptors import NoRoom, connections, fitting

PROGRAM = """
import resource, sys
from gateway.descriptors import NoRoom, connections
resource.setrlimit(resource.RLIMIT_NOFILE, (300, int(sys.argv[1])))
try:
    most = connections(int(sys.argv[2]), promised=sys.argv[3] == "promised")
    print(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except NoRoom as error:
    print(error)
"""


def told(hard: int, wanted: int, how: str) -> str:
    """What a process says whose limits are 300 and `hard`."""
    arguments = [sys.executable, "-c", PROGRAM, str(hard), str(wanted), how]
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()


def test_the_limit_is_raised_as_far_as_it_must() -> None:
    """And no farther."""
    assert told(1000, 300, "promised") == "300 856"


def test_what_was_only_wanted_is_cut() -> None:
    """The default promises nothing."""
    assert told(1000, 10_000, "wanted") == f"{fitting(1000)} 1000"


def test_what_was_promised_is_kept_or_refused() -> None:
    """With what to do about it."""
    assert "max_connections: 10000 needs 20256 file descriptors, and the system allows 1000" in told(
        1000, 10_000, "promised"
    )


def test_enough_is_left_alone() -> None:
    """This very process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections(1, promised=True) == 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    with pytest.raises(NoRoom):
        connections(10**9, promised=True)
