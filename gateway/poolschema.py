"""The part of the configuration that says where a pool's backends are found, and how they are judged and waited for."""

from __future__ import annotations

from typing import Annotated

from gateway.address import DnsName, NameServer
from gateway.section import HttpPath, Name, Port, Section, if_empty, option
from gateway.units import Count, Flag, Seconds, Share


class Kubernetes(Section):
    """The ready endpoints of a service."""

    service: Name = option(..., "name of the service")
    port: Port = option(..., "its port")
    namespace: Name | None = option(None, "its namespace; the gateway's own if left out")


class Discovery(Section):
    """Backends found at run time: `dns` or `kubernetes`."""

    dns: DnsName | None = option(None, "every address of this name; of its SRV records if it begins with `_`")
    nameserver: NameServer | None = option(None, "who is asked for it; the system's own if left out")
    kubernetes: Annotated[Kubernetes | None, if_empty(None)] = option(None, "every endpoint of a service")


class Health(Section):
    """Who gets no work: by probes, and by how requests end."""

    path: HttpPath | None = option(None, "what is asked for; the engine's own path if left out")
    interval: Seconds = option(2.0, "between two probes of a backend; `0s` for none")
    unhealthy_after: Count = option(3, "failed probes in a row that take a backend out", ge=1)
    healthy_after: Count = option(2, "good probes in a row that bring it back", ge=1)
    eject: Flag = option(True, "take a backend out for a while when its requests fail")


class Signals(Section):
    """What the engines tell of themselves."""

    path: HttpPath | None = option(None, "where the engine's metrics are; its own path if left out")
    interval: Seconds = option(0.25, "between two looks at them, 5s at least for llama.cpp; `0s` for none")


class Timeouts(Section):
    """The five clocks of one attempt on a backend; the first to run out ends it."""

    connect: Seconds = option(1.0, "until the connection stands", gt=0)
    headers: Seconds | None = option(
        None,
        "until the response's headers; if left out, 30s for streams, and `total` for whole answers, whose headers "
        "come when they are done",
        gt=0,
    )
    first_token: Seconds = option(60.0, "until the first token of a stream", gt=0)
    idle: Seconds = option(30.0, "between two chunks", gt=0)
    total: Seconds = option(900.0, "until the end", gt=0)


class Wake(Section):
    """For a pool that may be scaled to zero: requests wait for it while `headrace_wakeup_wanted` calls for capacity."""

    hold: Seconds = option(60.0, "longest wait for the first backend; longer than one takes to start", gt=0)
    max_held: Count = option(256, "requests that may wait so")


class Hedge(Section):
    """For streams that are slow to begin (whole answers come late by nature): a second attempt beside the first, on
    another backend with a free place, while nobody waits in the pool. It is one of the retries, in number and in
    budget. Whichever brings its first event first is the answer; the other is given up."""

    after: Seconds = option(
        ..., "so long after its dispatch; about the 95th percentile of the time to the first token", gt=0
    )
    prompt_tokens: Count = option(1000, "longest prompt of which it is made, as estimated", ge=1)


class Retries(Section):
    """Before the first byte only, and never on a backend already tried."""

    attempts: Count = option(2, "other backends tried after the first; 0 for none", le=10)
    budget: Share = option(
        0.1, "retries as a share of the requests of the pool; where nobody took the connection they cost nothing"
    )
    hedge: Annotated[Hedge | None, if_empty(None)] = option(
        None, "a second attempt beside a slow one; none if left out"
    )
