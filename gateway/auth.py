"""Who is asking: API keys, known only by their SHA-256."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from gateway.catalog import Tenant
from gateway.errors import INVALID_API_KEY, Refused
from gateway.exchange import Header

PREFIX = "hr-"  # lets secret scanners recognise a leaked key
CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
# One text for missing, malformed, unknown and expired keys.
REFUSED = "Incorrect API key provided. Send one of this gateway's as `Authorization: Bearer KEY`."


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant's key: `digest` is the SHA-256 of the key as sent; `expires` in seconds since the epoch."""

    id: str
    digest: bytes
    tenant: Tenant
    expires: float | None = None

    def expired(self, now: float) -> bool:
        """Whether it is good for nothing any more."""
        return self.expires is not None and now >= self.expires


class KeyRing:
    """All keys. With none at all everybody is the `anonymous` tenant; the configuration allows that on loopback. When a
    key was last good for something is kept in `used`, by digest: rings that follow each other share it."""

    def __init__(
        self,
        keys: Iterable[Key],
        anonymous: Tenant | None,
        wall_clock: Callable[[], float],
        used: dict[bytes, float] | None = None,
    ) -> None:
        self._keys = {key.digest: key for key in keys}
        self._anonymous = anonymous
        self._wall_clock = wall_clock
        self._used = {} if used is None else used

    def identify(self, headers: Sequence[Header]) -> Tenant:
        """Raises Refused unless exactly one valid key was sent, be it in several headers, but in each once."""
        if self._anonymous is not None:
            return self._anonymous
        sent = [(name, _credential(name, value)) for name, value in headers if name in CREDENTIALS]
        credential = sent[0][1] if sent else b""
        if credential and (len(sent) == 1 or _agree(sent)):
            # The table is searched by digest: how long that takes says nothing about any key.
            digest = sha256(credential).digest()
            key = self._keys.get(digest)
            if key is not None and hmac.compare_digest(key.digest, digest):
                now = self._wall_clock()
                if not key.expired(now):
                    self._used[digest] = now
                    return key.tenant
        raise Refused(INVALID_API_KEY, REFUSED)

    def tenant(self, name: str) -> Tenant | None:
        """A tenant that has a key, by name; the anonymous one where there are no keys."""
        if self._anonymous is not None:
            return self._anonymous if name == self._anonymous.name else None
        return next((key.tenant for key in self._keys.values() if key.tenant.name == name), None)

    def keys(self, tenant: str) -> list[tuple[Key, float | None]]:
        """A tenant's keys, each with when it was last used (seconds since the epoch), if it was since the start."""
        return [(key, self._used.get(key.digest)) for key in self._keys.values() if key.tenant.name == tenant]


def _agree(sent: Sequence[Header]) -> bool:
    """Whether different headers say the same."""
    return len({name for name, _ in sent}) == len(sent) and len({credential for _, credential in sent}) == 1


def _credential(name: bytes, value: bytes) -> bytes:
    if name != b"authorization":
        return value
    scheme, _, credential = value.partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""


def new_key() -> tuple[str, str]:
    """A fresh key of 256 bits, to be shown once, and the digest that the configuration holds."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, sha256(key.encode()).hexdigest()
