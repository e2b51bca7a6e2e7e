"""What all of the admin port has in common: it asks for the token, and answers and refuses in JSON."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import openai_error
from gateway.config import Config
from gateway.errors import INVALID_REQUEST, GatewayError, Refused
from gateway.ledger import iso
from gateway.problem import document
from gateway.reload import Report

Handler = Callable[[Request], Awaitable[Response]]
SHUT = (
    "server.admin_token is not configured, so there is no way in here: give the gateway a file with one, "
    "such as server: {admin_token: env:HEADRACE_ADMIN_TOKEN}."
)

write = msgspec.json.Encoder().encode


def guarded(now: Callable[[], Config], handler: Handler) -> Handler:
    """The handler, for who has the admin token of the configuration that holds. Where there is none, nobody has."""

    async def asked(request: Request) -> Response:
        token = now().server.admin_token
        if token is None:
            return told(403, SHUT)
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        # Digests are of one length: the time says nothing of the token's.
        right, given = (sha256(text.encode()).digest() for text in (token.reveal(), sent.strip()))
        if scheme.lower() != "bearer" or not hmac.compare_digest(right, given):
            return told(401, "The admin token is missing or wrong: send Authorization: Bearer TOKEN.")
        return await handler(request)

    return asked


def check_query(request: Request, known: Mapping[str, tuple[str, ...]]) -> None:
    """Raises Refused for a parameter that there is not, and for a value that is none of its own; () stands for any."""
    for name, value in request.query_params.items():
        if name not in known:
            raise Refused(INVALID_REQUEST, f"There is no parameter {name!r}; there are {', '.join(known)}.", param=name)
        if known[name] and value not in known[name]:
            raise Refused(INVALID_REQUEST, f"{name} may be {' or '.join(known[name])}, not {value!r}.", param=name)


def written(told: object, status: int = 200) -> Response:
    """As JSON."""
    return Response(write(told), status, media_type="application/json")


def told(status: int, message: str, code: str = "admin_token_required") -> Response:
    """An error."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return Response(openai_error("invalid_request_error", code, message), status, headers, "application/json")


async def refused(_: Request, error: Exception) -> Response:
    """A request that cannot be served, as Starlette's handler of exceptions."""
    assert isinstance(error, GatewayError)
    row = error.refusal
    body = openai_error(row.type, row.code, error.message, error.param)
    return Response(body, row.status, media_type="application/json")


def outcome(report: Report) -> dict[str, Any]:
    """What came of an attempt to change the configuration."""
    return {
        "generation": report.generation,
        "result": report.result,
        "cause": report.cause,
        "at": iso(report.at),
        "changes": report.changes,
        "restart_needed": report.restart,
        "problems": [document(problem) for problem in report.problems],
    }


def standing(report: Report, settings: Config) -> dict[str, Any]:
    """The same, and the configuration that holds, with secrets as references."""
    return outcome(report) | {"configuration": settings.model_dump(mode="json", exclude_none=True)}
