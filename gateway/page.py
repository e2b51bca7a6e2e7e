"""The console's page, as it lies in the package: nothing in it is secret, and nothing of it comes from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/console": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", SCRIPT),
    "/console/board.js": ("board.js", SCRIPT),
    "/console/request.js": ("request.js", SCRIPT),
    "/console/elements.js": ("elements.js", SCRIPT),
}
# Only what lies beside it runs or is asked; no frame holds it, no form leaves it, and text never becomes markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """The page and what it loads, for everybody: what it shows is asked for with the admin token."""
    return [Route(path, _file) for path in FILES]


async def _file(request: Request) -> Response:
    name, kind = FILES[request.url.path]
    body = files("gateway").joinpath("console", name).read_bytes()
    return Response(body, headers=HEADERS | {"content-type": kind})
