"""Asking a running gateway's admin port, for the commands that do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import httpx

from gateway.address import Address
from gateway.given import given

ADMIN = "http://127.0.0.1:9090"
TOKEN = "HEADRACE_ADMIN_TOKEN"  # noqa: S105 (the name of a variable)


def asked(
    path: Path | None, admin: str | None, what: str, method: str = "GET", told: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the gateway answers at `what`. Its address and token are those of its file; without one the token is that of
    the environment. Raises ClickException with what to do."""
    url, headers = reached(path, admin)
    try:
        answer = httpx.request(method, f"{url}{what}", headers=headers, json=told, timeout=10, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(f"{url} does not answer: {error}. Is it the admin port (server.admin)?") from error
    if answer.status_code in (401, 403):
        raise click.ClickException(f"{url} asks for its token: {answer.json()['error']['message']}")
    if answer.status_code == httpx.codes.BAD_REQUEST:
        raise click.ClickException(answer.json()["error"]["message"])
    if answer.status_code != httpx.codes.OK:
        raise click.ClickException(f"{url} answers {answer.status_code}. Is it the admin port (server.admin)?")
    found: dict[str, Any] = answer.json()
    return found


def reached(path: Path | None, admin: str | None) -> tuple[str, dict[str, str]]:
    """The URL of the admin port, and the headers that open it."""
    url, token = _address(path) if path is not None else (ADMIN, None)
    token = token or os.environ.get(TOKEN, "")
    return (admin or url).rstrip("/"), {"authorization": f"Bearer {token}"} if token else {}


def _address(path: Path) -> tuple[str, str | None]:
    server = given(path).server
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.admin.host, server.admin.host)  # noqa: S104
    token = server.admin_token.reveal() if server.admin_token is not None else None
    return f"http://{Address(host, server.admin.port)}", token
