"""Keys: known by their hash, sent once, and refused in one voice."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth import PREFIX, REFUSED, Key, KeyRing, new_key
from gateway.catalog import Tenant
from gateway.errors import Refused
from gateway.exchange import Header

ACME, OTHER, ANYBODY = Tenant("acme"), Tenant("other"), Tenant("anonymous")
NOW = 1_800_000_000.0


def key(secret: bytes, tenant: Tenant, expires: float | None = None) -> Key:
    return Key("k", sha256(secret).digest(), tenant, expires)


RING = KeyRing(
    [key(b"one", ACME), key(b"two", OTHER), key(b"old", ACME, NOW), key(b"new", ACME, NOW + 1)], None, lambda: NOW
)


def bearer(credential: bytes) -> Header:
    return (b"authorization", b"Bearer " + credential)


@pytest.mark.parametrize(
    "headers",
    [
        [bearer(b"one")],
        [(b"authorization", b"bearer one")],
        [(b"authorization", b"BEARER  one ")],
        [(b"x-api-key", b"one")],
        [(b"api-key", b"one")],
        [(b"accept", b"*/*"), bearer(b"one"), (b"x-api-key", b"one"), (b"api-key", b"one")],
        [bearer(b"new")],
    ],
)
def test_a_key_is_its_tenant(headers: list[Header]) -> None:
    """In each header that takes one, in several that agree, and up to the second in which it expires."""
    assert RING.identify(headers) is ACME


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"one")],
        [(b"authorization", b"Basic one")],
        [(b"authorization", b"Bearer\tone")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer one")],
        [bearer(b"unknown")],
        [bearer(b"One")],
        [bearer(b"one one")],
        [bearer(sha256(b"one").hexdigest().encode())],
        [bearer(sha256(b"one").digest())],
        [bearer(b"old")],
        [bearer(b"one"), bearer(b"one")],
        [bearer(b"one"), bearer(b"two")],
        [bearer(b"one"), (b"x-api-key", b"two")],
        [bearer(b"one"), (b"x-api-key", b"")],
        [(b"authorization", b"Basic x"), (b"x-api-key", b"one")],
        [(b"api-key", b"one"), (b"api-key", b"one")],
        [(b"cookie", b"one"), (b"proxy-authorization", b"Bearer one"), (b"x-goog-api-key", b"one")],
    ],
)
def test_everything_else_is_refused_in_one_voice(headers: list[Header]) -> None:
    """Missing, malformed, unknown, expired, given twice: the same words."""
    with pytest.raises(Refused) as refused:
        RING.identify(headers)
    assert (refused.value.message, refused.value.refusal.status) == (REFUSED, 401)


CREDENTIALS = st.sampled_from([b"one", b"two", b"old", b"", b"x"]) | st.binary(max_size=12)
VALUES = CREDENTIALS | CREDENTIALS.map(lambda credential: b"Bearer " + credential)
NAMES = st.sampled_from([b"authorization", b"x-api-key", b"api-key", b"accept"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4))
def test_any_headers_are_a_tenant_or_refused(headers: list[Header]) -> None:
    """Never another exception; whoever is let in has sent its key, and no credential but that."""
    try:
        tenant = RING.identify(headers)
    except Refused:
        return
    said = {value.removeprefix(b"Bearer ").strip() for name, value in headers if name == b"authorization"}
    said |= {value for name, value in headers if name in (b"x-api-key", b"api-key")}
    assert said <= ({b"one", b"new"} if tenant is ACME else {b"two"})
    assert len(said) == 1


def test_without_keys_everybody_is_anonymous() -> None:
    """Whatever they send."""
    ring = KeyRing([], ANYBODY, lambda: NOW)
    assert ring.identify([]) is ANYBODY
    assert ring.identify([bearer(b"one"), bearer(b"two")]) is ANYBODY


def test_a_ring_without_keys_lets_nobody_in() -> None:
    """Tenants none of whom has a key."""
    with pytest.raises(Refused):
        KeyRing([], None, lambda: NOW).identify([bearer(b"one")])


def test_fresh_keys() -> None:
    """256 bits behind a prefix that secret scanners know; the digest is the key's as sent; none comes twice."""
    secret, digest = new_key()
    assert secret.startswith(PREFIX) and len(secret) == len(PREFIX) + 43
    assert digest == sha256(secret.encode()).hexdigest()
    assert new_key() != new_key()
    assert (
        KeyRing([Key("k", bytes.fromhex(digest), ACME)], None, lambda: NOW).identify([bearer(secret.encode())]) is ACME
    )
