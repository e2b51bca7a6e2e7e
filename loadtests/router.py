"""What a simulation drives: the gateway's scheduler, or a published policy with the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.types import Dispatch, Drop, Ending, Job, Reason, RemoteLoad, Usage


class Router(Protocol):
    """What is simulated: the gateway's scheduler, or a published policy in its place.

    After any of the calls, and at `next_deadline`, the simulation asks `due` what to do.
    """

    def submit(self, job: Job, now: float) -> Reason | None: ...
    def first_token(self, job_id: int, now: float) -> None: ...
    def tokens(self, job_id: int, n: int, now: float) -> bool: ...
    def leave(self, job_id: int, now: float, ending: Ending, usage: Usage | None = None) -> None: ...
    def due(self, now: float) -> list[Dispatch | Drop]: ...
    def next_deadline(self) -> float | None: ...
    def publish(self, now: float) -> tuple[RemoteLoad, ...]: ...
    def observe_remote(self, gateway: str, loads: Sequence[RemoteLoad], now: float) -> None: ...


class Omniscient:
    """What a router need not be told, since it sees the fleet itself."""

    def first_token(self, job_id: int, now: float) -> None:
        """The fleet knows."""

    def tokens(self, job_id: int, n: int, now: float) -> bool:
        return False

    def leave(self, job_id: int, now: float, ending: Ending, usage: Usage | None = None) -> None:
        """The fleet knows."""

    def next_deadline(self) -> float | None:
        return None

    def publish(self, now: float) -> tuple[RemoteLoad, ...]:
        return ()

    def observe_remote(self, gateway: str, loads: Sequence[RemoteLoad], now: float) -> None:
        """The fleet knows."""
