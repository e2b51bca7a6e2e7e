"""The part of the configuration that says which of a model's requests try something new."""

from __future__ import annotations

from typing import Annotated, Literal

from gateway.address import BackendUrl
from gateway.section import Name, Section, if_empty, option
from gateway.units import Count, Share


class Canary(Section):
    """A new version beside the old one: a pool, or some of the backends of the model's own pool."""

    pool: str = option("", "the pool that runs the new version; the model's own pool stands in for it")
    backends: Annotated[tuple[BackendUrl, ...], if_empty(())] = option((), "or the backends that do, by their URLs")
    weight: Share = option(..., "share of the tenants or conversations that get it")
    sticky: Literal["tenant", "conversation"] = option(
        "tenant", "who stays with one version: a tenant, or each of its conversations by its first user message"
    )


class Shadow(Section):
    """A pool on trial gets copies of answered requests, and its answers are dropped."""

    pool: Name = option(..., "the pool that gets the copies")
    sample: Share = option(0.01, "share of the answered requests that are copied")
    at_once: Count = option(8, "copies under way; what would be more is skipped", ge=1)
