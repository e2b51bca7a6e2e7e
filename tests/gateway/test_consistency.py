"""What only several keys together can get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from gateway.config import Config, ConfigError, parse

A, B = "aa" * 32, "bb" * 32
POOLS = """\
pools:
  eu: {engine: vllm, backends: [{url: http://a:1, region: eu}]}
  us: {engine: ollama, backends: [{url: http://b:1, region: us}]}
models:
  big: {pool: eu, aliases: [gpt-4o]}
  small: {pool: us}
"""
FAULTS = {
    # nothing to serve with
    "models: {m: {}}": ["pools: is required: name at least one pool with its backends"],
    "pools: {p: {backends: [{url: http://a:1}]}}": ["models: is required: name at least one model (* stands for any)"],
    "server: {}": [
        "pools: is required: name at least one pool with its backends",
        "models: is required: name at least one model (* stands for any)",
    ],
    # pools and models
    "pools: {p: {}}\nmodels: {m: {}}": [
        "pools.p: needs either backends (such as [{url: http://10.0.0.11:8000}]) or discovery"
    ],
    "pools: {p: {backends: [{url: http://a}], discovery: {dns: a:1}}}\nmodels: {m: {}}": [
        "pools.p: needs either backends (such as [{url: http://10.0.0.11:8000}]) or discovery"
    ],
    "pools: {p: {discovery: {}}}\nmodels: {m: {}}": [
        "pools.p.discovery: needs either dns (such as vllm.models.svc:8000) or kubernetes"
    ],
    "pools: {p: {backends: [{url: http://a}, {url: 'http://A:80/v1'}]}}\nmodels: {m: {}}": [
        "pools.p.backends[1].url: is the same backend as backends[0]: keep one"
    ],
    "pools: {p: {backends: [{url: http://a}], timeouts: {connect: 5s, total: 5s}}}\nmodels: {m: {}}": [
        "pools.p.timeouts.connect: must be shorter than total"
    ],
    "pools: {p: {backends: [{url: http://a}], retries: {attempts: 0, hedge: {after: 1s}}}}\nmodels: {m: {}}": [
        "pools.p.retries.hedge: is a retry, and attempts is 0: allow at least one"
    ],
    POOLS + "  m: {}": ["models.m.pool: is required, as there are several pools; pools: eu, us"],
    POOLS + "  m: {pool: uss}": ["models.m.pool: there is no pool uss; did you mean us?"],
    POOLS + "  m: {pool: eu, aliases: [m]}": ["models.m.aliases[0]: is the name of a model: remove the alias"],
    POOLS + "  m: {pool: eu, aliases: [big, gpt-4o, x, x]}": [
        "models.m.aliases[0]: is the name of a model: remove the alias or rename the model",
        "models.m.aliases[1]: is an alias of big already: an alias belongs to one model",
        "models.m.aliases[3]: is an alias of m already: an alias belongs to one model",
    ],
    POOLS + '  "*": {pool: eu, upstream_name: x}': [
        "models.*: stands for any name, so it has neither aliases nor an upstream_name"
    ],
    POOLS + '  "*": {pool: eu}\n  other: {pool: us}': [
        "models.other: is what limits and metrics call the models of *: choose another name"
    ],
    # tenants
    POOLS + f"tenants: {{a: {{models: [big], keys: [{{sha256: {A}}}, {{sha256: {A}}}]}}}}": [
        "tenants.a.keys[1].sha256: is the same key as tenants.a.keys[0]: a key belongs to one tenant, once"
    ],
    POOLS + f"tenants: {{a: {{models: [big], keys: &k [{{sha256: {A}}}]}}, b: {{models: [small], keys: *k}}}}": [
        "tenants.b.keys[0].sha256: is the same key as tenants.a.keys[0]: a key belongs to one tenant, once"
    ],
    POOLS + f"tenants: {{a: {{keys: [{{id: k, sha256: {A}}}, {{id: k, sha256: {B}}}]}}}}": [
        "tenants.a.keys[1].id: is also the id of keys[0]: ids are unique in a tenant"
    ],
    POOLS + 'classes: {night: {}, "a\\r\\nb": {}, nächtlich: {}}': [
        'classes."a\\r\\nb": stands in headers of requests and answers: write it in ASCII, without blanks',
        "classes.nächtlich: stands in headers of requests and answers: write it in ASCII, without blanks",
    ],
    POOLS + "tenants: {a: {classes: [batch, nightly]}}": [
        "tenants.a.classes[1]: there is no class nightly; classes: batch, interactive"
    ],
    POOLS + "tenants: {a: {models: [big, gpt-4o, smal, 'gpt-5*']}}": [
        "tenants.a.models[2]: matches no model: smal; did you mean small?",
        "tenants.a.models[3]: matches no model: gpt-5*; did you mean gpt-4o?",
    ],
    POOLS + "tenants: {a: {limits: {models: {gpt-4o: {concurrent: 1}}}}}": [
        "tenants.a.limits.models.gpt-4o: there is no such model (aliases share its limits); models: big, small"
    ],
    POOLS + "tenants: {a: {models: [big], residency: [eu, us]}}": [
        "tenants.a.residency[1]: no backend that the tenant may use is in region us; regions: eu"
    ],
    POOLS + "tenants: {a: {models: [big]}, b: {models: [small], trust_group: a}}": [
        "tenants.b.trust_group: is the name of a tenant that is in no group: "
        "name the group there too, or choose another name"
    ],
    POOLS + "tenants: {a: {}, b: {models: [small]}}": [
        "security.secret: is required, as tenants a and b share the pool us: write secret: env:HEADRACE_SECRET"
    ],
    POOLS + "tenants: {a: {isolation: true}, b: {models: [small]}}\nsecurity: {secret: env:S}": [
        "tenants.a.isolation: the pool us cannot keep it apart from b: give the tenant models of a pool of its own"
    ],
    # listeners
    POOLS + "server: {listen: 0.0.0.0:80}": [
        "server.listen: without tenants everybody who reaches 0.0.0.0:80 could use the models: "
        "add tenants with keys, or listen on 127.0.0.1"
    ],
    POOLS + "server: {listen: 127.0.0.1:80, admin: 0.0.0.0:80}": [
        "server.admin: cannot share its port with listen (127.0.0.1:80): choose another port"
    ],
}  # fmt: skip
SOUND = {
    "two pools, tenants apart": "tenants: {a: {models: [big]}, b: {models: [small]}}",
    "secret for shared pools": "tenants: {a: {}, b: {}}\nsecurity: {secret: env:S}",
    "a group of two": "tenants: {a: {trust_group: g}, b: {trust_group: g, isolation: true}}\nsecurity: {secret: env:S}",
    "a group named after a member": "tenants: {a: {trust_group: a}, b: {trust_group: a}}\nsecurity: {secret: env:S}",
    "isolation where salts work": "tenants: {a: {models: [big], isolation: true}, b: {}}\nsecurity: {secret: env:S}",
    "any address with tenants": "server: {listen: 0.0.0.0:80}\ntenants: {a: {}}",
    "a tenant without keys": "server: {listen: 0.0.0.0:80}\ntenants: {a: {keys: []}}",
    "an alias as a pattern": "tenants: {a: {models: ['gpt-*'], residency: [eu]}}",
}


def complaints(text: str) -> list[str]:
    """The findings on a text, without their places."""
    with pytest.raises(ConfigError) as caught:
        parse(text, environ={"S": "salt"})
    return [line.split(": ", 1)[1] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("text", "lines"), FAULTS.items(), ids=lambda value: value[0][:40] if isinstance(value, list) else ""
)
def test_contradictions_are_refused(text: str, lines: list[str]) -> None:
    """Each rule, with the words it uses, and no other finding beside it."""
    assert complaints(text) == lines


@pytest.mark.parametrize("name", SOUND)
def test_neighbours_of_contradictions_are_accepted(name: str) -> None:
    """The rules do not reach further than they say."""
    assert isinstance(parse(POOLS + SOUND[name], environ={"S": "salt"}), Config)


def test_wildcard_model_serves_any_pattern() -> None:
    """With `*` every pattern may match something, and a tenant of exact names does not reach it."""
    pools = POOLS.replace("small:", '"*":')
    assert parse(pools + "tenants: {a: {models: [anything]}}", environ={})
    shared = pools + "tenants: {a: {models: [big]}, b: {models: ['x-*']}}"
    assert parse(shared, environ={})
    assert complaints(shared.replace("[big]", "[big, y]"))[0].startswith("security.secret: is required")


def test_short_total_beside_default_clocks_is_legal() -> None:
    """Only what is contradictory as written is refused: the first clock to run out wins."""
    pool = "pools: {p: {backends: [{url: http://a}], timeouts: {%s}}}\nmodels: {m: {}}"
    assert parse(pool % "total: 500ms", environ={})
    assert parse(pool % "headers: 10s, first_token: 5s, idle: 20s, total: 3s", environ={})


def test_no_finding_is_owed_to_another_fault() -> None:
    """Where a section could not be read whole, rules that need all of it wait."""
    regions = POOLS.replace("region: eu", "region: ")
    assert complaints(regions + "tenants: {a: {models: [big], residency: [eu]}}") == [
        "pools.eu.backends[0].region: has no value: give it one or remove it"
    ]
    assert complaints(POOLS + "tenants: {a: {}, b: {}}\nsecurity: {secret: env:NONE}") == [
        "security.secret: the environment variable of env:NONE is not set"
    ]
    assert complaints(POOLS.replace("pools:", "pool:")) == ["pool: unknown key; did you mean pools?"]
    assert complaints(POOLS + "server: {listen: 0.0.0.0:80}\ntenant: {}") == [
        "tenant: unknown key; did you mean tenants?"
    ]


def test_thousands_of_tenants_are_checked_in_seconds() -> None:
    """The rules are linear in the number of tenants."""
    tenants = "".join(
        f"  t{i}: {{models: [big], isolation: true, keys: [{{sha256: '{i:064x}'}}]}}\n" for i in range(3000)
    )
    assert len(parse(POOLS + "tenants:\n" + tenants + "security: {secret: env:S}", environ={"S": "s"}).tenants) == 3000


@pytest.mark.parametrize(
    ("cert", "key", "what"),
    [
        ("cert", "key", None),
        ("cert", "other", "the key is another certificate's: name the one that cert was issued for"),
        ("key", "cert", "these are no certificate and its key: both as PEM, the key without a password"),
        ("cert", "locked", "these are no certificate and its key: both as PEM, the key without a password"),
        ("text", "key", "these are no certificate and its key: both as PEM, the key without a password"),
    ],
)
def test_a_certificate_that_cannot_be_served_is_found_before_the_start(
    cert: str, key: str, what: str | None, tmp_path: Path
) -> None:
    """By `headrace check`, too, and nobody is asked for the password of a key."""
    authority = trustme.CA()
    mine, another = authority.issue_cert("a"), authority.issue_cert("a")
    mine.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    mine.private_key_pem.write_to_path(tmp_path / "key")
    another.private_key_pem.write_to_path(tmp_path / "other")
    (tmp_path / "text").write_text("PEM")
    private = load_pem_private_key(mine.private_key_pem.bytes(), None)
    locked = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open"))
    (tmp_path / "locked").write_bytes(locked)
    text = POOLS + f"server: {{tls: {{cert: file:{cert}, key: file:{key}}}}}\n"
    if what is None:
        assert parse(text, folder=tmp_path).server.tls is not None
        return
    with pytest.raises(ConfigError) as caught:
        parse(text, folder=tmp_path)
    assert [problem.message for problem in caught.value.problems] == [what]
    assert str(caught.value).startswith("headrace.yaml:7:10: server.tls: ")
