"""The parts of a multipart form as they stand in the bytes; nothing is decoded or copied (RFC 7578).

The gateway decides by the names that it finds here, and the backend reads the form again. So whatever two readers could
read in two ways is refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_PARTS = 128  # an audio or image form has ten or so
MAX_PART_HEAD = 8 * 1024

PARAMETER = re.compile(rb'[ \t]*;[ \t]*([^\s;="]+)=(?:"((?:[^"\\\r\n]|\\[^\r\n])*)"|([^\s;"]*+))')
ODD_LINES = re.compile(rb"(?<!\r)\n|\r(?!\n)|(?:^|\n)[ \t]")  # bare line ends, folded lines
ESCAPE = re.compile(rb"\\(.)")
DISPOSITION = b"content-disposition:"


class BadForm(Exception):
    """The body is not the form that its content type promises. `flood` is True for too many parts."""

    def __init__(self, message: str, *, flood: bool = False) -> None:
        super().__init__(message)
        self.flood = flood


class Part(NamedTuple):
    """One field: its name, the offsets of its content, and those of the whole part from its delimiter to the next."""

    name: str
    start: int
    end: int
    first: int
    last: int


def boundary(content_type: bytes) -> bytes:
    """Raises BadForm where the content type names none, or two."""
    kind, _, _ = content_type.partition(b";")
    mark = _parameters(content_type[len(kind) :], "content type").get(b"boundary")
    if not mark or len(mark) > 200 or kind.strip().lower() != b"multipart/form-data":
        raise BadForm("This endpoint takes multipart/form-data with a boundary.")
    return mark


def parts(body: bytes, mark: bytes) -> list[Part]:
    """All parts in order. Raises BadForm for a form that is cut, malformed or has more than MAX_PARTS parts."""
    delimiter = b"--" + mark
    position = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(delimiter, position):  # what may stand before it is all that a reader of JSON reads
        raise BadForm("The form does not begin with the boundary that its content type names.")
    found: list[Part] = []
    while True:
        first = position
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
        name = _name(body[position + 2 : head_end], f"part {len(found) + 1}")
        start = head_end + 4
        position = content_end + 2
        found.append(Part(name, start, max(start, content_end), first, position))


def _name(head: bytes, where: str) -> str:
    """The one name in the head of a part."""
    lines = head.split(b"\r\n")
    told = [line[len(DISPOSITION) :].strip() for line in lines if line[: len(DISPOSITION)].lower() == DISPOSITION]
    if len(told) != 1 or told[0][:9].lower() != b"form-data" or ODD_LINES.search(head):
        raise BadForm(f"The head of {where} is malformed.")
    parameters = _parameters(told[0][9:], where)
    if b"name" not in parameters or any(key.startswith(b"name*") for key in parameters):
        raise BadForm(f"There is no name in {where}.")
    return parameters[b"name"].decode("utf-8", "replace")


def _parameters(text: bytes, where: str) -> dict[bytes, bytes]:
    """`; key=value; key="value"`, each key once and in lower case."""
    parameters: dict[bytes, bytes] = {}
    position = 0
    while match := PARAMETER.match(text, position):
        key = match[1].lower()
        if key in parameters:
            raise BadForm(f"A parameter of the {where} stands there twice.")
        parameters[key] = match[3] if match[2] is None else ESCAPE.sub(rb"\1", match[2])
        position = match.end()
    if text[position:].strip(b" \t;"):
        raise BadForm(f"The parameters of the {where} are malformed.")
    return parameters
