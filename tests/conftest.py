"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests run on the loop that the gateway runs on."""
    return "asyncio", {"use_uvloop": True}
