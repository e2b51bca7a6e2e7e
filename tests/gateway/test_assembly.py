"""What a configuration becomes."""

from __future__ import annotations

import time
from random import Random

from gateway import assembly
from gateway.config import parse
from gateway.pool import Pool

FILE = """
pools: {p: {backends: [{url: "http://a:1"}]}, q: {backends: [{url: "http://a:2"}]}}
models:
  one: {pool: p, slo: {itl: 60ms}}
  two: {pool: p, slo: {itl: 30ms, ttft: 1s}}
  three: {pool: q, slo: {ttft: 1s}}
"""


def test_the_strictest_promise_of_its_models_paces_a_pool() -> None:
    """A pool without promises keeps the scheduler's own."""
    pools: dict[str, Pool] = {}
    assembly.fit(pools, parse(FILE, environ={}), time.monotonic, Random(1))
    assert {name: pool.scheduler.rules.objective_s for name, pool in pools.items()} == {"p": 0.03, "q": 0.1}
