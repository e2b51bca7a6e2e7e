"""What every worker is to hold: the configuration that was found good last, and what was changed of its backends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.address import Address
from gateway.admin import Change
from gateway.config import Config, restated
from gateway.worker import Order


@dataclass(frozen=True, slots=True)
class Standing:
    """A configuration that holds; `number` counts from 1, one more for each that was taken."""

    number: int
    settings: Config


class Orders:
    """A worker that is started gets all of it; `version` tells what is newer than what it got. `listen` is the API's
    address once it is known, `workers` how many there are: each is one gateway to whoever shares limits with it."""

    def __init__(self, settings: Config, path: Path, listen: Address, workers: int) -> None:
        self.generation = Standing(1, settings)
        self._first = settings
        self.version = 0
        self.text = ""
        self._path = path
        self._listen = listen
        self._workers = workers
        self._changes: dict[tuple[bool, str, str], Change] = {}
        self.take(settings)

    def __repr__(self) -> str:
        return f"<Orders {self.generation.number}, {len(self._changes)} changes>"

    @property
    def changes(self) -> tuple[Change, ...]:
        """Those that still count."""
        return tuple(self._changes.values())

    def take(self, settings: Config) -> None:
        """This is what workers are told from now on. What only a restart of all changes is as it was at the start: a
        worker that is started later must not be another than the rest."""
        first = self._first
        server = {"listen": self._listen, "tls": first.server.tls, "keep_alive": first.server.keep_alive}
        telemetry = {"log": first.telemetry.log, "otlp": first.telemetry.otlp}
        told = {
            "server": settings.server.model_copy(update=server),
            "state": first.state.model_copy(update={"replicas": first.state.replicas * self._workers}),
            "telemetry": settings.telemetry.model_copy(update=telemetry),
        }
        self.text = restated(settings.model_copy(update=told))
        self.version += 1

    def apply(self, settings: Config) -> None:
        """It is another configuration."""
        self.generation = Standing(self.generation.number + 1, settings)

    def change(self, action: str, pool: str, url: str) -> None:
        """A backend was added, removed, drained or undrained: the last word of each kind counts."""
        key = (action in ("add", "remove"), pool, url)
        self._changes.pop(key, None)
        if action != "undrain":
            self._changes[key] = (action, pool, url)
        if action == "remove":
            self._changes.pop((False, pool, url), None)
        self.version += 1

    def order(self, admin: Path) -> bytes:
        """One line: all that a worker has to know that will be asked at `admin`."""
        return msgspec.json.encode(Order(self.text, str(self._path), str(admin), self.changes)) + b"\n"
