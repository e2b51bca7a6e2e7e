"""Keeping tenants' caches apart: the salt that an engine mixes into its cache keys, and the seed of our own digests.

Both derive from the operator's secret and the tenant's trust group, so that no tenant can guess another's, and fields
are length-prefixed, so that no two groups can be mistaken for each other.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from hashlib import sha256

from policies.prefix import namespace


def salt(secret: bytes, trust_group: str) -> str:
    """43 characters, as vLLM advises: base64url of HMAC-SHA256(secret, length-prefixed trust group)."""
    raw = trust_group.encode()
    digest = hmac.digest(secret, len(raw).to_bytes(8, "big") + raw, sha256)
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


class Seeds:
    """The seed of the prefix digests for each model and trust group, computed once each."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._known: dict[tuple[str, str], int] = {}

    def seed(self, model: str, trust_group: str) -> int:
        """64 bits. Models and groups are the configuration's: their number is bounded."""
        key = (model, trust_group)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = namespace(self._secret, model, "", trust_group)
        return known
