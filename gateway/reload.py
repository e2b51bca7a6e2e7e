"""Taking another configuration at run time: on a signal, for a changed file, or on request. The last good one stays.

The file is looked at every half second, and taken when it has been the same for one look: whoever writes it in place is
given the time. What counts is what its path leads to, so a swapped symbolic link (a Kubernetes ConfigMap) is a change
like any other. Files that it refers to, secrets and certificates, are looked at, too.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from gateway.config import Config, ConfigError, Problem, changes, effective, load, parse
from gateway.discovery import Cluster, Undiscoverable
from gateway.metrics import Counter, Family, Gauge
from gateway.secret import Secret
from gateway.section import Section

LOOK_S = 0.5
RESULTS = ("applied", "unchanged", "failed")
# What is bound, opened or counted with at the start. \b ends a name: server.admin is meant, not server.admin_token.
FIXED = re.compile(
    r"[-+~] (?:server\.(?:listen|admin|tls|keep_alive)|state|telemetry\.(?:log|otlp)|models\..+\.slo\.itl)\b"
)

Mark = tuple[tuple[int, int, int, int] | None, ...]

logger = logging.getLogger("headrace")


class Taken(Protocol):
    """A configuration that holds, and which one it is, counted from 1."""

    @property
    def number(self) -> int: ...
    @property
    def settings(self) -> Config: ...


class Subject(Protocol):
    """Whose configuration it is."""

    @property
    def generation(self) -> Taken: ...

    def apply(self, settings: Config) -> None:
        """Raises OSError or Undiscoverable where that cannot be done here; then nothing is changed."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of an attempt. `changes` are those against the configuration before; `restart` those against the one
    that the process started with, which hold only when it is started again. `at` is in seconds since the epoch."""

    result: str
    cause: str
    at: float
    generation: int
    changes: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        if self.problems:
            told = "\n".join(map(str, self.problems))
            return f"configuration not taken ({self.cause}), {self.generation} stays:\n{told}"
        restart = "; only a restart brings: " + ", ".join(self.restart) if self.restart else ""
        what = f"taken ({self.cause}): {', '.join(self.changes)}" if self.changes else f"unchanged ({self.cause})"
        return f"configuration {self.generation} {what}{restart}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A good configuration that was read, and all that is worked out about it beside the event loop."""

    settings: Config
    hash: str
    files: list[Path]
    changes: tuple[str, ...]
    restart: tuple[str, ...]


class Reloader:
    """`async with Reloader(...)` looks after one file. Without one there is nothing to take."""

    def __init__(self, path: Path | None, subject: Subject, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._subject = subject
        self._wall_clock = wall_clock
        self._started = subject.generation.settings
        self._files = files(path, self._started)
        self._hash = fingerprint(self._started)
        self._seen = mark(self._files)
        self._called = asyncio.Event()
        self._turn = asyncio.Lock()  # reading takes its time: who read first is applied first
        self._task: asyncio.Task[None] | None = None
        self._tally: Tally[str] = Tally()
        self._good_at = wall_clock()
        self.on_change: list[Callable[[Config], None]] = []
        self.last = Report("applied", "start", self._good_at, subject.generation.number)

    def __repr__(self) -> str:
        return f"<Reloader {self._path} {self.last.result}>"

    async def __aenter__(self) -> Reloader:
        if self._path is not None:
            self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()

    def call(self) -> None:
        """Read the file now, whether or not it seems to have changed. For signals: nobody waits for the answer."""
        self._called.set()

    async def reload(self, cause: str, text: str | None = None) -> Report:
        """Read the file, or `text` in its place, and take it if it is good."""
        async with self._turn:
            seen, found = await asyncio.to_thread(self._read, text)
            self._seen = seen
            report = self._take(found, cause) if isinstance(found, Candidate) else self._keep(found, cause)
        self._tally[report.result] += 1
        self.last = report
        logger.log(logging.ERROR if report.problems else logging.INFO, "%s", report)
        return report

    def metrics(self) -> Iterator[Family]:
        """Which configuration holds, and what came of attempts to change it."""
        now = self._subject.generation
        yield _gauge("headrace_config_generation", "Configurations taken since the start.", now.number)
        yield _gauge(
            "headrace_config_last_reload_successful",
            "Whether the file was good when it was read last.",
            int(not self.last.problems),
        )
        yield _gauge(
            "headrace_config_last_reload_success_timestamp_seconds", "When it was last good.", round(self._good_at, 3)
        )
        yield _gauge("headrace_config_restart_pending", "Changes that wait for a restart.", len(self.last.restart))
        info = Gauge("headrace_config_info", "A hash of the configuration that holds.", "hash", total="max")
        info.values[(self._hash,)] = 1
        yield info
        reloads = Counter("headrace_config_reloads_total", "Readings of the file by what came of them.", "result")
        reloads.values.update({(result,): self._tally[result] for result in RESULTS})
        yield reloads

    def _read(self, text: str | None) -> tuple[Mark, Candidate | tuple[Problem, ...]]:
        """In a thread: a large file takes tenths of a second. The mark is older than what was read, never newer."""
        if self._path is None:
            return (), (Problem("headrace", "there is no file: it was started with --backend"),)
        seen = mark(self._files)
        if text is None and _is_pipe(self._path):  # to open it would wait for its writer, and so would the end
            return seen, (Problem(str(self._path), "is a pipe, which can be read at the start only"),)
        try:
            settings = load(self._path) if text is None else parse(text, str(self._path), folder=self._path.parent)
        except ConfigError as error:
            return seen, error.problems
        if (unfit := _unfit(settings, self._path)) is not None:
            return seen, (unfit,)
        told = tuple(changes(self._subject.generation.settings, settings))
        restart = tuple(line for line in changes(self._started, settings) if FIXED.match(line))
        return seen, Candidate(settings, fingerprint(settings), files(self._path, settings), told, restart)

    def _take(self, found: Candidate, cause: str) -> Report:
        try:
            for on_change in self.on_change:
                on_change(found.settings)
            if found.changes:
                self._subject.apply(found.settings)
        except (OSError, Undiscoverable) as error:  # what the file asks of this machine is not there
            return self._keep((Problem(str(self._path), str(error)),), cause)
        if found.files != self._files:
            self._files, self._seen = found.files, mark(found.files)
        self._hash = found.hash
        self._good_at = self._wall_clock()
        result, number = "applied" if found.changes else "unchanged", self._subject.generation.number
        return Report(result, cause, self._good_at, number, found.changes, found.restart)

    def _keep(self, problems: tuple[Problem, ...], cause: str) -> Report:
        number = self._subject.generation.number
        return Report("failed", cause, self._wall_clock(), number, (), self.last.restart, problems)

    async def _watch(self) -> None:
        before = self._seen
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._called.wait()
            if self._called.is_set():
                self._called.clear()
                await self.reload("signal")
                continue
            now = await asyncio.to_thread(mark, self._files)
            if now == before and now != self._seen:
                await self.reload("file")
            before = now


def fingerprint(settings: Config) -> str:
    """Short and the same for configurations that say the same, however they are written."""
    return sha256(effective(settings).encode()).hexdigest()[:12]


def files(path: Path | None, settings: Config) -> list[Path]:
    """The file and all that it refers to."""
    if path is None:
        return []
    return [path, *dict.fromkeys(path.parent / each for each in _references(settings))]


def _references(value: object) -> Iterator[str]:
    if isinstance(value, Secret):
        if value.reference.startswith("file:"):
            yield value.reference.removeprefix("file:")
    elif isinstance(value, Path):
        yield str(value)
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _references(getattr(value, name))
    elif isinstance(value, Mapping | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _references(each)


def mark(paths: list[Path]) -> Mark:
    """What tells one state of files from another, links followed. None for what cannot be looked at."""
    return tuple(map(_mark, paths))


def _mark(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _is_pipe(path: Path) -> bool:
    try:
        return path.is_fifo()
    except OSError:  # who reads it is told why
        return False


def _unfit(settings: Config, path: Path) -> Problem | None:
    """What is well said and cannot be done here: backends that cannot be looked for."""
    for name, pool in settings.pools.items():
        if pool.discovery is not None and pool.discovery.kubernetes is not None:
            try:
                Cluster.inside()
            except Undiscoverable as error:
                return Problem(str(path), str(error), ("pools", name, "discovery", "kubernetes"))
    return None


def _gauge(name: str, text: str, value: float) -> Gauge:
    gauge = Gauge(name, text, total="max")
    gauge.values[()] = value
    return gauge
