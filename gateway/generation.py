"""One configuration at work: what the requests that begin under it are judged by, to their end."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.auth import KeyRing
from gateway.catalog import Catalog
from gateway.config import Config


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """`number` counts from 1, one more for each configuration that was taken. `origins` may call the API from pages."""

    number: int
    settings: Config
    keys: KeyRing
    catalog: Catalog
    origins: frozenset[bytes]
