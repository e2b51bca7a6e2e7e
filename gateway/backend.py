"""Where a request may be sent: address, credential and clocks of one backend."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The five clocks, in seconds. `headers` of None means 30 s for a stream; a whole answer, whose head comes
    only when it is done, is then bounded by `total` alone."""

    connect: float = 1.0
    headers: float | None = None
    first_token: float = 60.0
    idle: float = 30.0
    total: float = 900.0

    def headers_for(self, *, stream: bool) -> float:
        """The limit until the response head."""
        if self.headers is not None:
            return self.headers
        return min(30.0, self.total) if stream else self.total


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """One server of a pool. `name` is its URL as configured, free of credentials: the label of its metrics.

    `concurrency` is the most requests that it may run; one that `bounds_itself` takes fewer where its engine tells how
    much memory it has. `speed` is its prefill speed relative to the pool's others, `region` where it stands,
    `cost_per_hour` its price in the operator's currency, `revision` that of the model there.
    """

    name: str
    pool: str
    host: str
    port: int
    host_header: bytes
    prefix: bytes = b""
    tls: ssl.SSLContext | None = None
    authorization: bytes | None = field(default=None, repr=False)
    timeouts: Timeouts = Timeouts()
    concurrency: int = 1024
    bounds_itself: bool = False
    speed: float = 1.0
    region: str | None = None
    cost_per_hour: float = 0.0
    revision: str | None = None
