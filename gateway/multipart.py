"""The parts of a multipart form as they stand in the bytes; nothing is decoded or copied (RFC 7578)."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_PARTS = 128  # an audio or image form has ten or so
MAX_PART_HEAD = 8 * 1024

BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
NAME = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*name=(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;"]+))', re.IGNORECASE | re.MULTILINE
)


class BadForm(Exception):
    """The body is not the form that its content type promises. `flood` is True for too many parts."""

    def __init__(self, message: str, *, flood: bool = False) -> None:
        super().__init__(message)
        self.flood = flood


class Part(NamedTuple):
    """One field: its name and the offsets of its content."""

    name: str
    start: int
    end: int


def boundary(content_type: bytes) -> bytes:
    """Raises BadForm where the content type names none."""
    match = BOUNDARY.search(content_type)
    if match is None or not content_type.lower().startswith(b"multipart/form-data"):
        raise BadForm("This endpoint takes multipart/form-data with a boundary.")
    return match[1] or match[2]


def parts(body: bytes, mark: bytes) -> list[Part]:
    """All parts in order. Raises BadForm for a form that is cut, malformed or has more than MAX_PARTS parts."""
    delimiter = b"--" + mark
    position = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if position == 1:
        raise BadForm("The form does not contain the boundary that its content type names.")
    found: list[Part] = []
    while True:
        position += len(delimiter)
        if body.startswith(b"--", position):
            return found
        if not body.startswith(b"\r\n", position):
            raise BadForm(f"The form is malformed after part {len(found)}.")
        if len(found) == MAX_PARTS:
            raise BadForm(f"The form has more than {MAX_PARTS} parts.", flood=True)
        head_end = body.find(b"\r\n\r\n", position, position + MAX_PART_HEAD)
        content_end = body.find(b"\r\n" + delimiter, head_end + 2)
        if head_end < 0 or content_end < 0:
            raise BadForm(f"The form ends inside part {len(found) + 1}.")
        name = NAME.search(body[position + 2 : head_end + 2])
        if name is None:
            raise BadForm(f"Part {len(found) + 1} of the form has no name.")
        found.append(
            Part((name[1] or name[2] or b"").decode("utf-8", "replace"), head_end + 4, max(head_end + 4, content_end))
        )
        position = content_end + 2
