"""How many connections tenants have open, where they may have only so many."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gateway.catalog import Tenant
from gateway.errors import CONNECTIONS_LIMIT, Refused


class Door(Protocol):
    """A connection. `owner` is the tenant whose latest request came by it, if its connections are counted; `on_closed`
    is called when it is lost."""

    owner: str
    on_closed: Callable[[], None] | None


class Entrance(Protocol):
    """A request, and the connection that it came by."""

    @property
    def door(self) -> Door: ...

    gone: bool
    keep_alive: bool


class Doors:
    """The connections of tenants with a limit. One that another tenant goes on to use changes hands."""

    def __init__(self) -> None:
        self.open: Tally[str] = Tally()

    def __repr__(self) -> str:
        return f"<Doors {dict(self.open)}>"

    def enter(self, entrance: Entrance, tenant: Tenant) -> None:
        """A request of the tenant has come: its connection is the tenant's from now on, until it closes or is
        another's. Raises Refused where the tenant has as many as it may, and closes that one behind the answer."""
        most, door = tenant.connections, entrance.door
        if (most is None and not door.owner) or door.owner == tenant.name or entrance.gone:
            return
        if most is not None and self.open[tenant.name] >= most:
            entrance.keep_alive = False
            message = f"Tenant {tenant.name!r} may have {most} connections open, and has: close some, or share them."
            raise Refused(CONNECTIONS_LIMIT, message, retry_after=1.0)
        self._leave(door)
        if most is not None:
            door.owner, door.on_closed = tenant.name, partial(self._leave, door)
            self.open[tenant.name] += 1

    def _leave(self, door: Door) -> None:
        """The connection is nobody's any more. Twice is harmless."""
        owner, door.owner, door.on_closed = door.owner, "", None
        if owner:
            self.open[owner] -= 1
            if not self.open[owner]:
                del self.open[owner]
