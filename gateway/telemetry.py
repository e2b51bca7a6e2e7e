"""What is told of a finished request: metrics and one log line, both read from its Exchange, once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.exchange import Exchange
from gateway.metrics import Family
from gateway.requestlog import request_line
from gateway.requestmetrics import RequestMetrics


class Telemetry:
    """Counts and logs."""

    def __init__(self, write_log: Callable[[bytes], object], wall_clock: Callable[[], float]) -> None:
        self._write_log = write_log
        self._wall_clock = wall_clock
        self._requests = RequestMetrics()

    def record(self, x: Exchange) -> None:
        """The one place where a request is counted and logged."""
        self._requests.count(x)
        self._write_log(request_line(x, self._wall_clock()))

    def metrics(self) -> Iterator[Family]:
        """What is told of requests."""
        yield from self._requests.metrics()
