"""Models as each tenant sees them: by name, by alias, by pattern, or not at all."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog import ANY, MAX_NAME, Canary, Catalog, Model, Tenant

LLAMA = Model("llama-8b", "p", "meta/Llama", aliases=("gpt-4o-mini", "small"))
QWEN = Model("qwen/72b", "q", aliases=("large",))
ODD = Model("[x]*", "p")
OTHERS = Model(ANY, "q")


def catalog(*models: Model) -> Catalog:
    return Catalog(models, created=1)


def tenant(*globs: str) -> Tenant:
    return Tenant("t", models=globs)


@pytest.mark.parametrize(
    ("globs", "seen"),
    [
        (("*",), ["llama-8b", "gpt-4o-mini", "small", "qwen/72b", "large", "[x]*"]),
        (("llama-*",), ["llama-8b", "gpt-4o-mini", "small"]),
        (("qwen/72b",), ["qwen/72b", "large"]),
        (("qwen*", "llama-8b"), ["llama-8b", "gpt-4o-mini", "small", "qwen/72b", "large"]),
        (("small",), ["small"]),
        (("gpt-*", "large"), ["gpt-4o-mini", "large"]),
        (("[x]*",), ["[x]*"]),
        (("LLAMA-8b",), []),
        ((), []),
    ],
)
def test_a_tenant_sees_what_its_patterns_mean(globs: tuple[str, ...], seen: list[str]) -> None:
    """A model's name brings its aliases along; an alias stands for itself only; a name means itself, whatever is in
    it."""
    assert catalog(LLAMA, QWEN, ODD).visible(tenant(*globs)) == seen


def test_what_keeps_tenants_apart_is_not_shown() -> None:
    """Neither the salt of their caches nor what chooses them for a canary."""
    shown = repr(Tenant("t", salt="pepper")) + repr(Canary("old", 0.5, b"pepper", "new"))
    assert "pepper" not in shown


def test_names_and_aliases_lead_to_their_model() -> None:
    """And what is not there, or not for this tenant, to nothing."""
    models = catalog(LLAMA, QWEN)
    assert models.find(tenant("*"), "llama-8b") is LLAMA
    assert models.find(tenant("*"), "gpt-4o-mini") is LLAMA
    assert models.find(tenant("qwen*"), "gpt-4o-mini") is None
    for name in ("Llama-8b", "llama-8b ", "meta/Llama", "", ANY):
        assert models.find(tenant("*"), name) is None


def test_the_model_of_all_other_names() -> None:
    """`*` takes names that nobody else has, as far as the tenant's patterns go; it is in no list."""
    models = catalog(LLAMA, OTHERS)
    assert models.find(tenant("*"), "anything") is OTHERS
    assert models.find(tenant("*"), "small") is LLAMA
    assert models.find(tenant("any*"), "anything") is OTHERS
    assert models.find(tenant("any*"), "nothing") is None
    assert models.find(tenant("any*"), "small") is None
    assert models.visible(tenant("*")) == ["llama-8b", "gpt-4o-mini", "small"]
    assert (OTHERS.label, LLAMA.label) == ("other", "llama-8b")


def test_a_name_without_measure_is_not_looked_for() -> None:
    """Not even where every name is taken."""
    models = catalog(OTHERS)
    assert models.find(tenant("*"), "n" * MAX_NAME) is OTHERS
    assert models.find(tenant("*"), "n" * (MAX_NAME + 1)) is None


def test_the_default_is_the_only_model_there_is() -> None:
    """For the tenant that asks: the only one it sees, however many names that has; none where it sees two."""
    assert catalog(LLAMA).default(tenant("*")) is LLAMA
    assert catalog(LLAMA, QWEN).default(tenant("qwen/*")) is QWEN
    assert catalog(LLAMA, QWEN).default(tenant("large", "nothing")) is QWEN
    assert catalog(LLAMA, QWEN).default(tenant("*")) is None
    assert catalog(LLAMA).default(tenant("qwen/*")) is None
    assert catalog(OTHERS).default(tenant("*")) is OTHERS
    assert catalog(OTHERS).default(tenant("any*")) is None
    assert catalog().default(tenant("*")) is None


NAMES = st.sampled_from(["a", "ab", "abc", "b", "a/b", "[a]", "*b", "?"])
GLOBS = st.lists(st.sampled_from(["*", "a", "a*", "?b", "[a]", "*b", "b", "a/?"]), max_size=3)


@given(st.lists(NAMES, unique=True, max_size=5), GLOBS, NAMES, st.booleans())
def test_what_is_found_is_what_may_be_used(names: list[str], globs: list[str], asked: str, catch_all: bool) -> None:
    """For any models without aliases: found if and only if it exists and a pattern means it; and the list agrees."""
    models = catalog(*(Model(name, "p") for name in names), *([OTHERS] if catch_all else []))
    allowed = any(glob in (asked, ANY) or fnmatchcase(asked, glob) for glob in globs)
    found = models.find(tenant(*globs), asked)
    assert (found is not None) == (allowed and (asked in names or catch_all))
    assert found is None or found.name == (asked if asked in names else ANY)
    seen = models.visible(tenant(*globs))
    assert (asked in seen) == (allowed and asked in names)
    assert [name for name in names if name in seen] == seen
