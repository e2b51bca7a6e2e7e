"""Reading compressed trace files. Every complaint names file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


class TraceError(ValueError):
    """A trace file that cannot be read; the message begins with `file:line:`."""


def objects(path: Path, parse: Callable[[dict[str, Any]], Record]) -> Iterator[Record]:
    """What `parse` makes of each line's JSON object; its KeyError, TypeError and ValueError become a TraceError."""
    for place, line in _lines(path):
        try:
            yield parse(json.loads(line))
        except KeyError as error:
            raise TraceError(f"{place}: no field {error}") from error
        except (IndexError, TypeError, ValueError) as error:
            raise TraceError(f"{place}: {error}") from error


def rows(path: Path, columns: tuple[str, ...], parse: Callable[[list[str]], Record]) -> Iterator[Record]:
    """The same for CSV: `parse` gets the fields of `columns`, which the header must name."""
    lines = _lines(path)
    place, head = next(lines, (f"{path}:1", ""))
    header = head.rstrip("\r\n").split(",")
    if missing := [column for column in columns if column not in header]:
        raise TraceError(f"{place}: no column {missing[0]!r} in {', '.join(header)!r}")
    order = [header.index(column) for column in columns]
    for place, line in lines:
        fields = line.rstrip("\r\n").split(",")
        if len(fields) != len(header):
            raise TraceError(f"{place}: {len(fields)} fields, the header has {len(header)}")
        try:
            yield parse([fields[i] for i in order])
        except ValueError as error:
            raise TraceError(f"{place}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}:{number}", line
    except FileNotFoundError:
        raise TraceError(f"{path}:1: no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:{number + 1}: broken: {error}") from error
