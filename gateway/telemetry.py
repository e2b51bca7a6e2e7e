"""What is told of a finished request: metrics, spans and one log line, read from its Exchange, once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from random import Random

from gateway.catalog import Tenant
from gateway.exchange import Exchange
from gateway.metrics import Family
from gateway.recent import Recent
from gateway.requestlog import request_line
from gateway.requestmetrics import UNKNOWN, PoolMetrics, RequestMetrics
from gateway.schema import ANY_MODEL, Config
from gateway.spans import Finished, Setting
from gateway.timeline import Objective, parts, verdict
from gateway.tracing import Tracer
from gateway.versions import Versions

SHOWN = 64 * 1024  # bytes of a prompt that a trace may hold
OTHER = "other"  # the label of tenants beyond the cap, and of models that have no name of their own
NO_OBJECTIVE = Objective()


class Telemetry:
    """Counts and logs. What was counted outlives a reload; `configure` says by which names and objectives it goes
    from now on."""

    def __init__(
        self,
        write_log: Callable[[bytes], object],
        tracer: Tracer | None,
        wall_clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._write_log = write_log
        self._tracer = tracer
        self._wall_clock = wall_clock
        self._rng = rng
        self.requests = RequestMetrics()
        self.pools = PoolMetrics()
        self.recent = Recent()
        self.versions = Versions(wall_clock)
        self.tenants: Collection[str] = ()  # those that have series of their own
        self._objectives: dict[str, Objective] = {}
        self._log_share = 1.0

    def configure(self, settings: Config) -> None:
        """From now on it is as in `settings`."""
        self._log_share = settings.telemetry.log_sample
        self.tenants = frozenset(islice(settings.tenants or ("anonymous",), settings.telemetry.tenants))
        self._objectives = {
            OTHER if name == ANY_MODEL else name: Objective(told.slo.ttft, told.slo.itl)
            for name, told in settings.models.items()
        }
        self.requests.begin(self._objectives, settings.classes)
        if self._tracer is not None:
            self._tracer.share = settings.telemetry.sample
            self._tracer.setting = Setting(
                {name: str(told.engine) for name, told in settings.pools.items()},
                {name: told.upstream_name for name, told in settings.models.items() if told.upstream_name},
            )

    def label(self, tenant: Tenant | None) -> str:
        """What stands for a tenant in metrics."""
        return UNKNOWN if tenant is None else tenant.name if tenant.name in self.tenants else OTHER

    def record(self, x: Exchange) -> None:
        """The one place where a request is counted and logged."""
        wall = self._wall_clock()
        tenant = self.label(x.tenant)
        objective = self._objectives.get(x.call.label, NO_OBJECTIVE) if x.call is not None else NO_OBJECTIVE
        spent = parts(x)
        judged = verdict(x, spent, objective)
        cause = judged.cause if judged is not None else None
        trace_id = ""
        if (
            self._tracer is not None
            and x.trace is not None
            and self._tracer.keep(Finished(x, wall, tenant, cause, _prompt(x)))
        ):
            trace_id = x.trace.text
        usage = x.meter.usage if x.meter is not None else None
        self.requests.count(x, usage, tenant, spent, judged, (trace_id, wall))
        self.pools.count(x, usage, spent.queue)
        self.recent.note(x, spent, cause, wall)
        if x.call is not None and x.call.canary is not None:
            self.versions.count(x)
        if self._log_share >= 1.0 or x.fault or cause or self._rng.random() < self._log_share:
            self._write_log(request_line(x, usage, wall, cause, spent.queue))

    def metrics(self, alive: Collection[tuple[str, str]]) -> Iterator[Family]:
        """What is told of requests. Backends that are not `alive`, each by its pool and name, are forgotten."""
        yield from self.requests.metrics()
        yield from self.pools.metrics(alive)
        yield from self.versions.metrics()


def _prompt(x: Exchange) -> str:
    """The prompt as sent, where its tenant has it in traces."""
    if x.tenant is None or x.call is None or not x.tenant.content:
        return ""
    return b" ".join(x.call.prompt)[:SHOWN].decode("utf-8", "replace")
