"""The configuration as a whole: what is read, how each fault is reported, and the ways it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.address import A_LISTENER, Address
from gateway.config import Config, ConfigError, admin_port, changes, effective, load, open_pool, parse
from tests.gateway.test_configuration_page import ENVIRON, example

HASH = "ab" * 32
BASE = "pools: {p: {backends: [{url: http://a:1}]}}\nmodels: {m: {}}\n"


def report(text: str, **around: Any) -> list[str]:
    """The lines of the report on a text that cannot serve."""
    with pytest.raises(ConfigError) as caught:
        parse(text, environ={}, **around)
    return str(caught.value).splitlines()


@pytest.fixture
def whole(tmp_path: Path) -> Config:
    """The complete example of the documentation."""
    return parse(example(tmp_path), folder=tmp_path, environ=ENVIRON)


def test_pools_and_models_are_all_that_is_needed() -> None:
    """Everything else has the documented default."""
    config = parse(BASE, environ={})
    assert config.server.listen == Address("127.0.0.1", 8080)
    assert config.models["m"].pool == "p"
    timeouts = config.pools["p"].timeouts
    clocks = (timeouts.connect, timeouts.headers, timeouts.first_token, timeouts.idle, timeouts.total)
    assert clocks == (1, None, 60, 30, 900)
    assert (config.pools["p"].retries.attempts, config.pools["p"].retries.budget) == (2, 0.1)
    assert list(config.classes) == ["interactive", "batch"]
    assert (config.classes["batch"].max_wait, config.classes["batch"].ceiling) == (900, 0.7)
    assert config.tenants == {}
    assert config.state.url.reveal() == "memory"


def test_the_whole_file_is_read(whole: Config, tmp_path: Path) -> None:
    """A sample of every section of the complete example."""
    assert whole.server.tls is not None
    assert whole.server.tls.cert == tmp_path / "tls.crt"
    assert whole.server.max_connections == 10_000
    assert whole.pools["llama"].backends[1].speed == 0.5
    assert whole.pools["llama"].api_key is not None
    assert whole.pools["llama"].api_key.reveal() == "vllm-value"
    assert whole.pools["embeddings"].discovery is not None
    assert whole.models["llama-3-8b"].slo.itl == 0.06
    acme = whole.tenants["acme"]
    assert (acme.limits.tokens_per_minute, acme.limits.burst, acme.limits.models["llama-3-8b"].concurrent) == (
        200_000,
        0.5,
        20,
    )
    assert acme.keys[0].expires is not None
    assert acme.keys[0].expires.isoformat() == "2031-01-31T00:00:00+00:00"
    assert whole.telemetry.log == "json"


def test_names_may_hold_any_character() -> None:
    """Names of tenants, keys, models and pools that YAML would take for something else, or that need escapes."""
    names = ["null", "2024-10-01", "1e3", "off", "a.b", "ü ✓", 'q"\\', "tab\there", "esc\x1b", "a" * 256]
    pools = "pools: {p: {backends: [{url: http://a:1}]}}\n"
    for name in names:
        tenants = {name: {"keys": [{"id": name, "sha256": HASH}], "models": [name]}}
        config = parse(pools + yaml.safe_dump({"models": {name: {}}, "tenants": tenants}), environ={})
        assert config.tenants[name].keys[0].id == name
        assert config.tenants[name].allows(name)
        assert parse(effective(config), environ={}) == config
    plain = parse(pools + "models: {null: {}, 2024-10-01: {}, 1e3: {}, off: {}}\ntelemetry: {log: off}\n", environ={})
    assert list(plain.models) == ["null", "2024-10-01", "1e3", "off"]
    assert plain.telemetry.log == "off"


def test_empty_sections_count_as_left_out() -> None:
    """All entries commented out, or a template that filled in nothing."""
    text = BASE + "tenants:\nclasses: ~\nserver: {tls: , cors: }\nstate: null\n"
    assert parse(text, environ={}) == parse(BASE, environ={})


def test_what_engines_can_do_is_known() -> None:
    """Isolation by salt and the path of the probe, unless the file says otherwise."""
    pool = "pools: {p: {engine: %s, backends: [{url: http://a:1}]}}\nmodels: {m: {}}"
    known = {
        "vllm": (True, "/health"),
        "sglang": (True, "/health"),
        "trtllm": (True, "/health"),
        "tgi": (False, "/health"),
        "llamacpp": (False, "/health"),
        "ollama": (False, "/"),
        "openai": (False, "/v1/models"),
        "tgi, isolation: true, health: {path: /ping}": (True, "/ping"),
        "vllm, isolation: false": (False, "/health"),
    }
    for engine, facts in known.items():
        told = parse(pool % engine, environ={}).pools["p"]
        assert (told.isolates, told.health_path) == facts, engine


def test_class_defaults_hold_key_by_key_and_order_is_urgency() -> None:
    """A class that is named in part keeps the rest of its own defaults; interactive leads unless placed."""
    classes = parse(BASE + "classes: {batch: {max_wait: 1m}, nightly: {}}", environ={}).classes
    assert list(classes) == ["interactive", "batch", "nightly"]
    assert (classes["batch"].max_wait, classes["batch"].max_queued, classes["batch"].ceiling) == (60, 4096, 0.7)
    assert classes["nightly"].max_queued == 256
    placed = parse(BASE + "classes: {urgent: {}, interactive: {}}", environ={}).classes
    assert list(placed) == ["urgent", "interactive", "batch"]


def faults() -> list[tuple[str, list[str]]]:
    """The texts of config_faults.txt, each with the lines of its report."""
    cases = (Path(__file__).parent / "config_faults.txt").read_text().split("\n\n")[1:]
    return [(case.partition("\n=> ")[0], re.findall(r"^=> (.*)", case, re.MULTILINE)) for case in cases]


@pytest.mark.parametrize(
    ("text", "lines"), faults(), ids=lambda value: value[0][:60] if isinstance(value, list) else ""
)
def test_each_fault_has_its_place_key_and_fix(text: str, lines: list[str]) -> None:
    """One line per fault: file, line, column, path, what was wrong and what is right; nothing else is invented."""
    whole = text if text.startswith("pools:") else BASE + text
    assert report(whole) == [f"headrace.yaml:{line}" for line in lines]


def test_all_faults_are_reported_at_once_in_the_order_of_the_file() -> None:
    """Syntax that can be stepped over, values, and what only several keys get wrong, in one go."""
    text = """\
server:
  listen: 0.0.0.0:8080
  drain: 30
  drain: 40s
pools:
  llama:
    engine: vlm
    backends:
      - {url: http://10.0.0.1:8000}
      - {url: "http://10.0.0.1:8000/"}
      - {url: 10.0.0.2}
      - {url: http://10.0.0.1:8000/v1, concurrency: many}
  small: []
models:
  a: {pool: lama}
  b: {pool: small, aliases: [a]}
tenants:
  acme: {classes: [interactiv], weight: heavy}
"""
    assert report(text) == [
        "headrace.yaml:3:3: server.drain: read '30': a duration has a unit, such as 500ms, 2s, 10m or 1h30m",
        "headrace.yaml:4:3: server.drain: this key stands on line 3 already: keep one",
        "headrace.yaml:7:5: pools.llama.engine: read 'vlm', which is not known here; did you mean vllm?",
        "headrace.yaml:10:10: pools.llama.backends[1].url: is the same backend as backends[0]: keep one",
        "headrace.yaml:11:10: pools.llama.backends[2].url: "
        "a backend's URL begins with http:// or https://, such as http://10.0.0.11:8000",
        "headrace.yaml:12:40: pools.llama.backends[3].concurrency: "
        "read 'many': a count is a whole number, such as 64, 200k or 1.5M",
        "headrace.yaml:13:3: pools.small: keys were expected here (key: value), not a list",
        "headrace.yaml:15:7: models.a.pool: there is no pool lama; did you mean llama?",
        "headrace.yaml:16:30: models.b.aliases[0]: is the name of a model: remove the alias or rename the model",
        "headrace.yaml:18:20: tenants.acme.classes[0]: there is no class interactiv; did you mean interactive?",
        "headrace.yaml:18:33: tenants.acme.weight: read 'heavy': a number was expected, such as 2 or 0.5",
    ]


def test_a_report_has_a_last_line() -> None:
    """A file of some other kind is wrong in every line; all problems are kept, the text is not endless."""
    with pytest.raises(ConfigError) as caught:
        parse(BASE + "".join(f"k{number}: 1\n" for number in range(600)), environ={})
    assert len(caught.value.problems) == 600
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (501, "... and 100 more problems")


def test_load_reads_a_file_and_names_it(tmp_path: Path) -> None:
    """References start at the file's folder, problems at its name."""
    (tmp_path / "key").write_text("value\n")
    path = tmp_path / "headrace.yaml"
    path.write_text("pools: {p: {backends: [{url: http://a:1}], api_key: file:key}}\nmodels: {m: {}}\n")
    key = load(path).pools["p"].api_key
    assert key is not None
    assert key.reveal() == "value"
    path.write_text(BASE + "x: 1")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:3:1: x: unknown key")
    assert [problem.loc for problem in caught.value.problems] == [("x",)]
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(tmp_path / "none.yaml")


def test_open_pool_forwards_any_model_for_one_anonymous_tenant() -> None:
    """What `serve --backend` serves: loopback, no tenants, the wildcard model."""
    config = open_pool(["http://127.0.0.1:8001", "http://127.0.0.1:8002/v1"], listen="127.0.0.1:0")
    assert [backend.url for backend in config.pools["default"].backends] == [
        "http://127.0.0.1:8001",
        "http://127.0.0.1:8002",
    ]
    assert config.models["*"].pool == "default"
    assert config.tenants == {}
    assert parse(effective(config), environ={}) == config


def test_open_pool_reports_by_flag() -> None:
    """Without a file the place of a problem is the option of the command line."""
    with pytest.raises(ConfigError) as caught:
        open_pool(["http://a:1", "http://a:1/", "file:x"], listen="0.0.0.0:80", admin="9090")
    assert sorted(str(caught.value).splitlines()) == [
        f"--admin: read '9090': {A_LISTENER}",
        "--backend: a backend's URL begins with http:// or https://, such as http://10.0.0.11:8000",
        "--backend: is the same backend as backends[0]: keep one",
    ]
    with pytest.raises(ConfigError, match="--listen: without tenants everybody who reaches"):
        open_pool(["http://a:1"], listen="0.0.0.0:80")
    with pytest.raises(ConfigError, match="--backend: needs"):
        open_pool([])


def test_configuration_is_frozen() -> None:
    """Nothing changes it in flight: a reload makes another."""
    config = parse(BASE, environ={})
    with pytest.raises(Exception, match="frozen"):
        config.server.drain = 1.0


def test_effective_configuration_is_complete_and_reads_back(whole: Config, tmp_path: Path) -> None:
    """Defaults are filled in, units are human, secrets are references; it is a configuration file itself."""
    text = effective(whole)
    assert "max_buffered: 256MiB" in text
    assert "tokens_per_minute: 200k" in text
    assert "api_key: env:VLLM_API_KEY" in text
    assert "on_failure: local_share" in text
    assert parse(text, folder=tmp_path / "elsewhere", environ=ENVIRON) == whole
    assert effective(parse(text, environ=ENVIRON)) == text


def test_changes_are_told_line_by_line(whole: Config, tmp_path: Path) -> None:
    """Added, removed and changed things by their path, in human units; nothing if nothing changed."""
    assert changes(whole, whole) == []
    text = example(tmp_path)
    for before, after in [
        ("drain: 30s", "drain: 1m"),
        ("http://10.0.0.12:8000", "http://10.0.0.13:8000"),
        ("concurrency: 256, region: eu, cost_per_hour: 2.50", "concurrency: 1k, region: eu, cost_per_hour: 2.50"),
        ("{id: acme-2, sha256: 6030", "{id: acme-3, sha256: 6031"),
        ("aliases: [gpt-4o-mini]", "aliases: [gpt-4o-mini, gpt-4o]"),
        ("    residency: [eu]\n", ""),
        ("  tls: {cert", "  #tls: {cert"),
        ("  globex:", "  initech:"),
        ("sample: 5%", "sample: 100%"),
    ]:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    new = parse(text, folder=tmp_path, environ=ENVIRON | {"VLLM_API_KEY": "rotated"})
    assert changes(whole, new) == [
        "- server.tls",
        "~ server.drain: 30s -> 1m",
        "~ pools.llama.backends.http://10.0.0.11:8000.concurrency: 256 -> 1000",
        "- pools.llama.backends.http://10.0.0.12:8000",
        "+ pools.llama.backends.http://10.0.0.13:8000",
        "~ pools.llama.api_key: another value behind env:VLLM_API_KEY",
        "~ models.llama-3-8b.aliases: [gpt-4o-mini] -> [gpt-4o-mini, gpt-4o]",
        "- tenants.acme.keys.acme-2",
        "+ tenants.acme.keys.acme-3",
        "~ tenants.acme.residency: [eu] -> []",
        "- tenants.globex",
        "+ tenants.initech",
        "~ telemetry.sample: 5% -> 100%",
    ]


def test_a_new_order_of_classes_is_a_change() -> None:
    """Their order is their urgency."""
    one = parse(BASE + "classes: {interactive: {}, batch: {}}", environ={})
    other = parse(BASE + "classes: {batch: {}, interactive: {}}", environ={})
    assert changes(one, other) == ["~ classes: [interactive, batch] -> [batch, interactive]"]


def test_the_admin_port_is_found_though_the_rest_of_the_file_cannot_be_read(tmp_path: Path) -> None:
    """A shell at three in the morning has the admin's token and no other secret, and the file may be what is wrong."""
    path = tmp_path / "headrace.yaml"
    path.write_text(
        "server: {admin: 10.0.0.1:9, admin_token: env:T, drain: 30}\nsecurity: {secret: env:S}\nmodles: {}\n"
    )
    told = admin_port(path, {"T": "open"})
    assert str(told.admin) == "10.0.0.1:9"
    assert told.admin_token is not None and told.admin_token.reveal() == "open"
    path.write_text("pools: {}\n")
    assert (str(admin_port(path, {}).admin), admin_port(path, {}).admin_token) == ("127.0.0.1:9090", None)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("server: {admin_token: env:T}", "1:10: server.admin_token: the environment variable of env:T is not set"),
        ("server: [a]", "1:1: server: keys were expected here (key: value), not a list"),
        ("server: {admin: 9}", "1:10: server.admin: read '9': an address to listen on is HOST:PORT"),
        ("- a", "1:1: keys were expected at the top"),
        ("a: b: c", "1:5: this is not YAML"),
    ],
)
def test_an_admin_port_that_cannot_be_read_is_told_with_its_place(text: str, what: str, tmp_path: Path) -> None:
    """As by `headrace check`."""
    path = tmp_path / "headrace.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        admin_port(path, {})
    assert str(caught.value).startswith(f"{path}:{what}")
