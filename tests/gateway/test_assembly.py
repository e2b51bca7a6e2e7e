"""What a configuration becomes."""

from __future__ import annotations

import time
from random import Random

import pytest

from gateway import assembly, entitled
from gateway.catalog import Tenant
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


@pytest.mark.parametrize(
    ("own", "other", "ignores"),
    [("vllm", "sglang", False), ("vllm", "ollama", True), ("openai", "vllm", True), ("tgi", "llamacpp", False)],
)
def test_a_model_ignores_case_where_any_of_its_engines_may(own: str, other: str, ignores: bool) -> None:
    """Ollama does, and nobody knows what `openai` stands for."""
    pools = [
        f'{name}: {{engine: {engine}, isolation: false, backends: [{{url: "http://a:{port}"}}]}}'
        for name, engine, port in (("p", own, 1), ("q", other, 2))
    ]
    file = f"pools: {{{', '.join(pools)}}}\nmodels: {{one: {{pool: p, fallback: [q]}}}}\n"
    model = entitled.catalog(parse(file, environ={}), 0).default(Tenant("t"))
    assert model is not None
    assert model.ignores_case is ignores


def test_who_requires_isolation_is_told_of_the_pools_that_others_use() -> None:
    """Others are of another trust group; nobody else is kept from anything."""
    key = "{keys: [{sha256: '%064x'}], models: [%s], isolation: %s, trust_group: %s}"
    told = [(1, "one, three", "true", "g"), (2, "three", "false", "g"), (3, "two", "false", "h")]
    tenants = ", ".join(f"t{number}: {key % (number, *rest)}" for number, *rest in told)
    security = "security: {secret: env:S}"
    file = FILE.replace("pools: {p: {", "pools: {p: {engine: vllm, ") + f"tenants: {{{tenants}}}\n{security}\n"
    ring = entitled.key_ring(parse(file, environ={"S": "s"}), time.time, {})
    found = {name: tenant.apart for name in ("t1", "t2", "t3") if (tenant := ring.tenant(name)) is not None}
    assert found == {"t1": {"p"}, "t2": frozenset(), "t3": frozenset()}
