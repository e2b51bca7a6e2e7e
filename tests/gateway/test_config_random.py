"""Whatever the file holds, there are two outcomes: a configuration that reads back, or an explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import ConfigError, changes, effective, parse, restated
from tests.gateway.test_config import BASE, HASH

STEADY = settings(deadline=None, derandomize=True)

SECTIONS = ["server", "pools", "models", "classes", "tenants", "state", "security", "telemetry"]
KEYS = ["listen", "backends", "url", "api_key", "engine", "keys", "sha256", "limits", "discovery", "dns", "secret"]
KEYS += ["trust_group", "residency", "isolation", "log", "aliases", "pool", "retries", "timeouts", "batch"]
VALUES = ["p", "m", "t", "http://a:1", "env:X", "file:x", HASH, "1s", "64MiB", "10%", "*", "", "vllm", "true", "ü\x1b"]
EXAMPLE = f"""\
{BASE}classes:
  interactive: {{max_queued: 256, max_wait: 10s}}
tenants:
  acme: &acme
    keys: [{{id: acme-1, sha256: "{HASH}"}}]
    models: ["*"]
    limits: {{requests_per_minute: 600, tokens_per_minute: 200k, concurrent: 50}}
  other: {{<<: *acme, keys: [], weight: 2}}
security:
  secret: env:X
"""
WORDS = SECTIONS + KEYS + VALUES
TREES = st.recursive(
    st.sampled_from(WORDS) | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inside, max_size=5),
    max_leaves=30,
)


def usable_or_explained(text: str) -> None:
    """The only two outcomes; what is usable reads back from its effective form."""
    try:
        config = parse(text, folder=Path("/nonexistent"), environ={"X": "hunter2"})
    except ConfigError as exc:
        assert exc.problems
        assert all(problem.message for problem in exc.problems)
        assert "hunter2" not in str(exc)
    else:
        assert "hunter2" not in effective(config)
        assert parse(effective(config), environ={"X": "hunter2"}) == config
        assert parse(restated(config), environ={"X": "hunter2"}) == config
        assert changes(config, config) == []


@STEADY
@given(TREES)
def test_any_tree_is_usable_or_explained(tree: Any) -> None:
    """Random structures made of the schema's own words."""
    usable_or_explained(yaml.safe_dump(tree))


@STEADY
@given(st.dictionaries(st.sampled_from(SECTIONS), TREES))
def test_any_section_is_usable_or_explained(tree: Any) -> None:
    """The same one level further in."""
    usable_or_explained(yaml.safe_dump(tree) + BASE * ("pools" not in tree and "models" not in tree))


@STEADY
@given(st.data())
def test_any_mutation_of_a_good_file_is_usable_or_explained(data: st.DataObject) -> None:
    """Slices of the example deleted, doubled, swapped for words or stray characters."""
    text = EXAMPLE
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.integers(0, 12))
        text = text[:start] + data.draw(st.sampled_from([*WORDS, *"\n\t:{}[]&*'\"#", text[start:end]])) + text[end:]
    usable_or_explained(text)
