"""The gateway with nothing told of any request: no metric, no trace, no log line, no booking. What telling costs is the
difference between it and the gateway; nobody would want to run it for anything else.

    python -m loadtests.untold headrace.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from gateway.exchange import Exchange
from gateway.given import given
from gateway.ledger import Ledger
from gateway.serve import serve
from gateway.telemetry import Telemetry


def tell_nothing(teller: object, x: Exchange) -> None:
    """In the place of `record`."""


if __name__ == "__main__":
    for teller in (Telemetry, Ledger):
        setattr(teller, "record", tell_nothing)  # noqa: B010 (mypy forbids the assignment, and rightly so)
    uvloop.run(serve(given(Path(sys.argv[1]))))
