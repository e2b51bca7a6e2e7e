"""What every worker is to hold."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.address import Address
from gateway.config import Config, parse, restated
from gateway.orders import Orders
from gateway.worker import Order

FILE = """
server: {listen: 127.0.0.1:0, keep_alive: 30s}
pools: {p: {backends: [{url: 'http://b'}, {url: 'http://c', concurrency: 1024}]}}
models: {m: {}}
tenants: {t: {keys: []}}
state: {url: 'redis://127.0.0.1:1/0', replicas: 2}
"""


@pytest.fixture
def orders() -> Orders:
    return Orders(parse(FILE, environ={}), Path("/etc/headrace.yaml"), Address("127.0.0.1", 8080), workers=4)


def told(orders: Orders) -> Config:
    """What a worker that is started now reads."""
    order = msgspec.json.decode(orders.order(Path("/run/0.sock")), type=Order)
    assert (order.path, order.admin) == ("/etc/headrace.yaml", "/run/0.sock")
    return parse(order.text, environ={})


def test_what_was_left_out_stays_left_out() -> None:
    """A default that was said is another thing than one that was not: concurrency, max_connections."""
    settings = parse(FILE, environ={})
    again = parse(restated(settings), environ={})
    assert again == settings
    for read in (settings, again):
        assert ["concurrency" in each.model_fields_set for each in read.pools["p"].backends] == [False, True]
        assert "max_connections" not in read.server.model_fields_set


def test_a_worker_is_one_of_many_on_a_port_that_is_known(orders: Orders) -> None:
    """Each is a gateway to who shares limits with it: two machines with four workers are eight."""
    read = told(orders)
    assert str(read.server.listen) == "127.0.0.1:8080"
    assert read.state.replicas == 8
    assert "max_connections" not in read.server.model_fields_set


def test_what_only_a_restart_changes_is_the_same_in_later_workers(orders: Orders) -> None:
    """The rest is new."""
    version = orders.version
    changed = FILE.replace("30s", "40s").replace(":1/0", ":2/0").replace("m: {}", "m: {}, n: {pool: p}")
    orders.take(parse(changed, environ={}))
    read = told(orders)
    assert orders.version > version
    assert sorted(read.models) == ["m", "n"]
    assert read.server.keep_alive == 30.0 and read.state.url.reveal() == "redis://127.0.0.1:1/0"


def test_the_last_word_on_a_backend_counts(orders: Orders) -> None:
    """Drained and undrained again is nothing; removed is no longer drained."""
    orders.change("drain", "p", "http://b")
    orders.change("add", "p", "http://d")
    assert orders.changes == (("drain", "p", "http://b"), ("add", "p", "http://d"))
    orders.change("undrain", "p", "http://b")
    orders.change("drain", "p", "http://d")
    orders.change("remove", "p", "http://d")
    assert orders.changes == (("remove", "p", "http://d"),)
    version = orders.version
    orders.change("add", "p", "http://d")
    assert orders.changes == (("add", "p", "http://d"),) and orders.version > version
