"""Asking a running gateway's admin port, for the commands that do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import httpx

from gateway.address import Address
from gateway.config import ConfigError, admin_port
from gateway.given import unfit

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
        raise silent(url, error) from error
    if answer.status_code != httpx.codes.OK:
        raise refused(url, answer, headers)
    found: dict[str, Any] = answer.json()
    return found


def silent(url: str, error: Exception) -> click.ClickException:
    """Nobody, or somebody else, is there."""
    return click.ClickException(f"{shown(url)} does not answer: {error}. Is it the admin port (server.admin)?")


def refused(url: str, answer: httpx.Response, headers: dict[str, str]) -> click.ClickException:
    """What an answer that is not 200 comes to, and what to do."""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        what = "does not take this token" if headers else "asks for its token"
        return click.ClickException(f"{shown(url)} {what}: name the gateway's file (-c FILE), or set {TOKEN}.")
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = ""
    if answer.status_code == httpx.codes.BAD_REQUEST and message:
        return click.ClickException(message)
    if answer.status_code == httpx.codes.NOT_FOUND:  # the port of the API has words of its own for that
        message = ""
    told = message or "Is it the admin port (server.admin) of a gateway of this version?"
    return click.ClickException(f"{shown(url)} answers {answer.status_code}. {told}")


def base(text: str, what: str) -> str:
    """A URL that may be asked, without a slash at its end. `what` is the argument or option that it was given as."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise click.BadParameter(f"a URL begins with http:// or https://, such as {ADMIN}", param_hint=what)
    return text.rstrip("/")


def shown(url: str) -> str:
    """A URL without the credentials that it may carry."""
    return str(httpx.URL(url).copy_with(userinfo=b""))


def reached(path: Path | None, admin: str | None) -> tuple[str, dict[str, str]]:
    """The URL of the admin port, and the headers that open it."""
    url, token = _address(path) if path is not None else (ADMIN, None)
    token = (token or os.environ.get(TOKEN, "")).strip()
    if not token.isascii() or not token.isprintable():
        raise click.UsageError(f"No header can carry this admin token ({TOKEN}): it is of ASCII letters and signs.")
    return base(admin or url, "--admin"), {"authorization": f"Bearer {token}"} if token else {}


def _address(path: Path) -> tuple[str, str | None]:
    try:
        server = admin_port(path)
    except ConfigError as error:
        unfit(error)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.admin.host, server.admin.host)  # noqa: S104
    token = server.admin_token.reveal() if server.admin_token is not None else None
    return f"http://{Address(host, server.admin.port)}", token
