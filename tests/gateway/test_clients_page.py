"""docs/clients.md lists all that an application can meet."""

from __future__ import annotations

import re
from pathlib import Path

from gateway import errors
from gateway.client import PATIENCE
from gateway.exchange import CACHED, WHERE
from gateway.rest import EXPOSED
from gateway.wire import ENDPOINTS

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()


def test_every_refusal_is_there_with_what_to_do() -> None:
    """In the order of the table in the code, and no other."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \| \S", PAGE, re.MULTILINE)
    known = [each for each in vars(errors).values() if isinstance(each, errors.Refusal)]
    assert rows == [(str(each.status), each.code, each.reason) for each in known]


def test_every_endpoint_is_there() -> None:
    """Beside the two lists of models."""
    told = PAGE.partition("## What may be sent")[0]
    assert re.findall(r"`(/[\w/]+)`", told) == list(ENDPOINTS)


def test_every_header_is_there() -> None:
    """Those that are read, and those that pages of other origins may see."""
    names = {name.split(b"-limit-")[0].decode() for name in EXPOSED.split(b", ")}
    for name in names | {WHERE.decode(), CACHED.decode(), PATIENCE[0].decode(), "x-headrace-class"}:
        assert f"`{name}" in PAGE or name.startswith("x-ratelimit"), name
