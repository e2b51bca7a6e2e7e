"""YAML with positions: a file as a tree of nodes, each knowing where it stands.

Every scalar stays text: what it means is decided by the key it stands at. So `log: off` is no boolean, an
unquoted hash of digits is no number, and a model may be called `2024-10-01`, `null` or `1e3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gateway.problem import ConfigError, Loc, Problem

MAX_BYTES = 2**20  # some 5,000 tenants; parsing takes a second or two
MAX_NODES = 300_000  # aliases counted as often as they are used: more than an honest file of MAX_BYTES holds
MAX_DEPTH = 20  # the schema needs 6

# PyYAML's words -> ours, where its words do not say what to do.
_HINTS = {
    "'\\t'": "a tab cannot indent: use spaces",
    "mapping values are not allowed": "a `: ` where no key can stand: quote the text, or mend the indentation",
    "cannot start any token": "a text that begins with this character needs quotes",
}


class Entry(NamedTuple):
    """One key of a mapping: where the key stands, and its value."""

    line: int
    column: int
    node: Node


@dataclass(slots=True)
class Node:
    """A value and where it stands. Aliases of an anchor share one node."""

    line: int
    column: int
    value: str | list[Node] | dict[str, Entry] = ""  # empty for null, too
    size: int = 1  # nodes, itself included, with aliases expanded
    height: int = 0  # levels below

    def children(self) -> list[Node]:
        """The values directly below."""
        match self.value:
            case dict(entries):
                return [entry.node for entry in entries.values()]
            case list(items):
                return items
        return []

    def plain(self) -> Any:
        """The tree as dicts, lists and texts."""
        match self.value:
            case dict(entries):
                return {key: entry.node.plain() for key, entry in entries.items()}
            case list(items):
                return [node.plain() for node in items]
        return self.value

    def position(self, loc: Loc) -> tuple[int, int]:
        """Where the key or item at `loc` stands, or else the nearest thing above it."""
        node, place = self, (self.line, self.column)
        for part in loc:
            if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
                line, column, node = node.value[part]
                place = (line, column)
            elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                place = (node.line, node.column)
            else:
                break
        return place


class _UnreadableError(Exception):
    """Nothing after this problem can be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Composer:
    """Builds the tree from PyYAML's events: its own composer loses duplicate keys and is not bounded."""

    def __init__(self, text: str, source: str) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._source = source
        self._anchors: dict[str, Node | None] = {}
        self._spent = 0  # nodes so far, aliases expanded
        self.problems: list[Problem] = []  # what could be stepped over

    def document(self) -> Node | None:
        """The only document, or None if there is none."""
        root = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _UnreadableError(self._problem("a second document starts here: keep one", (), event))
                root = self._node(next(self._events), ())
        return root

    def _problem(self, message: str, loc: Loc, event: Any) -> Problem:
        return Problem(self._source, message, loc, event.start_mark.line + 1, event.start_mark.column + 1)

    def _node(self, event: Any, loc: Loc) -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, loc)
        before = self._spent
        self._spend(1, 0, loc, event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # not complete: an alias inside it would refer to itself
        if event.tag not in (None, "!"):
            self.problems.append(self._problem("tags (!...) are not used here: write the plain value", loc, event))
        node = Node(event.start_mark.line + 1, event.start_mark.column + 1)
        if isinstance(event, yaml.ScalarEvent):
            null = event.implicit[0] and event.value in ("", "~", "null", "Null", "NULL")
            node.value = "" if null else self._text(event, loc)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.value = self._items(loc)
        else:
            node.value = self._entries(loc)
        node.size = self._spent - before
        node.height = max((child.height + 1 for child in node.children()), default=0)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _spend(self, size: int, height: int, loc: Loc, event: Any) -> None:
        self._spent += size
        if self._spent > MAX_NODES:
            message = f"more than {MAX_NODES} values, aliases counted at each use"
            raise _UnreadableError(self._problem(message, loc, event))
        if len(loc) + height > MAX_DEPTH:
            raise _UnreadableError(self._problem(f"nested more than {MAX_DEPTH} levels deep", loc[:3], event))

    def _text(self, event: Any, loc: Loc) -> str:
        text: str = event.value
        if any("\ud800" <= char <= "\udfff" for char in text):
            self.problems.append(self._problem("half a character: a surrogate stands alone", loc, event))
            return "\ufffd"
        return text

    def _alias(self, event: Any, loc: Loc) -> Node:
        # The name is not repeated: an unquoted secret that begins with * looks like an alias.
        if event.anchor not in self._anchors:
            message = "this alias has no anchor (a text that begins with * needs quotes)"
            raise _UnreadableError(self._problem(message, loc, event))
        node = self._anchors[event.anchor]
        if node is None:
            raise _UnreadableError(self._problem("this alias stands inside the value that it repeats", loc, event))
        self._spend(node.size, node.height, loc, event)
        return node

    def _items(self, loc: Loc) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*loc, len(items))))
        return items

    def _entries(self, loc: Loc) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        merges: list[tuple[Any, Node]] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._node(event, loc)  # counts the key, and keeps its anchor
            is_text = isinstance(event, yaml.ScalarEvent)
            key: str = event.value if is_text else "?"
            value = self._node(next(self._events), (*loc, key))
            if not is_text:
                self.problems.append(self._problem("a key must be a single text", loc, event))
            elif key == "<<" and event.implicit[0]:
                merges.append((event, value))
            elif key in entries:
                message = f"this key stands on line {entries[key].line} already: keep one"
                self.problems.append(self._problem(message, (*loc, key), event))
            else:
                entries[key] = Entry(event.start_mark.line + 1, event.start_mark.column + 1, value)
        for event, value in merges:
            self._merge(event, value, loc, entries)
        return entries

    def _merge(self, event: Any, value: Node, loc: Loc, entries: dict[str, Entry]) -> None:
        """`<<`: a mapping's own key wins, then the first merged mapping that has it."""
        for source in value.value if isinstance(value.value, list) else [value]:
            if not isinstance(source.value, dict):
                message = "<< takes an alias of a mapping, or a list of them: <<: *defaults"
                self.problems.append(self._problem(message, loc, event))
                continue
            for key, entry in source.value.items():
                entries.setdefault(key, entry)  # counted already, with the alias


def read_text(path: Path) -> str:
    """The text of a configuration file, or ConfigError."""
    source = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "this is not a path"
        raise ConfigError([Problem(source, f"cannot be read: {reason}")]) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError([Problem(source, f"is larger than {MAX_BYTES // 2**20} MiB: is it the right file?")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line, column = _line_and_column(raw[: exc.start].decode("utf-8-sig", "replace"))
        raise ConfigError([Problem(source, "this is not UTF-8: save the file as UTF-8", (), line, column)]) from None


def _line_and_column(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def compose(text: str, source: str) -> tuple[Node, list[Problem]]:
    """The tree of a YAML text, and what is wrong in it but can be stepped over; ConfigError if it cannot be read."""
    composer = _Composer(text, source)
    try:
        root = composer.document()
    except _UnreadableError as exc:
        fatal = exc.problem
    except yaml.MarkedYAMLError as exc:
        mark: Any = exc.problem_mark or exc.context_mark
        fatal = Problem(source, _explained(exc), (), mark.line + 1, mark.column + 1)
    except yaml.reader.ReaderError as exc:
        place = _line_and_column(text[: exc.position])
        fatal = Problem(source, "a character that YAML allows only escaped, in double quotes", (), *place)
    except (ValueError, ArithmeticError):  # PyYAML converts escapes and version numbers without a check
        fatal = Problem(source, "this is not YAML: an escape or a %YAML directive is out of range")
    else:
        if root is not None and isinstance(root.value, dict):
            return root, composer.problems
        fatal = Problem(source, "is empty: it needs pools and models")
        if root is not None and root.value != "":
            fatal = Problem(source, "keys were expected at the top: pools:, models: ...", (), root.line, root.column)
    raise ConfigError([fatal, *composer.problems])


def _explained(exc: yaml.MarkedYAMLError) -> str:
    """What PyYAML found, without its snippet and without names from the file (they could be parts of a secret)."""
    problem = exc.problem or ""
    for word, hint in _HINTS.items():
        if word in problem:
            return f"this is not YAML: {hint}"
    start = f"{exc.context} from line {exc.context_mark.line + 1}: " if exc.context and exc.context_mark else ""
    return "this is not YAML: " + start + re.sub(r" '(?!<)[^']{2,}'", "", problem)
