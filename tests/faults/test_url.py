"""Names of models in paths, and what a URL carries to a backend. Each test is named by its public case."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.fakes import Fake
from tests.faults.process import GatewayProcess
from tests.faults.rawclient import RawClient, ask, chat

pytestmark = pytest.mark.anyio

NAMES = ["org/name", "llava:13b", "org/name@v1+x", "中文模型", "a b", "50%", "q?x#y", "org/", "a//b", "..", "[x]*"]
PATHS = {
    "org/name": "org/name",
    "org%2Fname": "org/name",
    "org%2fname": "org/name",
    "llava:13b": "llava:13b",
    "llava%3A13b": "llava:13b",
    "org/name@v1+x": "org/name@v1+x",
    "org/name%40v1%2Bx": "org/name@v1+x",
    "%E4%B8%AD%E6%96%87%E6%A8%A1%E5%9E%8B": "中文模型",
    "a%20b": "a b",
    "50%25": "50%",
    "q%3Fx%23y": "q?x#y",
    "org/": "org/",
    "a//b": "a//b",
    "a%2F%2Fb": "a//b",
    "..": "..",
    "%2E%2E": "..",
    "[x]*": "[x]*",
    "m": "m",
}
NOWHERE = [
    "/v1/models/unknown",
    "/v1/models/ORG/name",
    "/v1/models/org%252Fname",
    "/v1/models/..%2Fmodels",
    "/v1/models/..%2F",
    "/v1/models/../models",
    "/v1/models/%00",
    "/v1/models/",
    "/v1/models//m",
    "//v1/models",
    "/v1//models",
    "/v1/./models",
    "/v1/x/../models",
    "/v1/chat/completions/../../models",
    "/V1/models",
    "/v1/models%2Fm%20",
    "/v1/models/%FF%FE",
    "/v1/models/" + "a" * 10_000,
    "/",
]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Models of odd names."""
    return {"models": {name: {"pool": "p"} for name in NAMES}}


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: g", *lines, "", ""]).encode()


async def test_b131_models_are_found_by_any_name(gateway: GatewayProcess, a: Fake) -> None:
    """Slashes, colons, blanks, other scripts, escaped or not: 200 with that id, by GET and by HEAD."""
    async with RawClient(gateway.port) as client:
        for path, name in PATHS.items():
            response = await client.ask(get(f"/v1/models/{path}"))
            assert (response.status, response.json()["id"]) == (200, name)
            head = await client.ask(get(f"/v1/models/{path}", method="HEAD"))
            assert (head.status, head.body, head.header("content-length")) == (200, b"", str(len(response.body)))
        listed = (await client.ask(get("/v1/models"))).json()["data"]
        assert [model["id"] for model in listed] == ["m", "one", "two", *NAMES]
    assert a.hits == 0
    await gateway.settled([a], sent=0)


async def test_b131_what_is_no_model_is_no_other_route_either(gateway: GatewayProcess, a: Fake) -> None:
    """Unknown names, dots and double slashes: 404 in OpenAI's shape, short, never a redirect or another route."""
    async with RawClient(gateway.port) as client:
        for path in NOWHERE:
            response = await client.ask(get(path))
            assert response.status == 404, path
            assert response.error()["code"] in ("model_not_found", "unknown_url"), path
            assert len(response.body) < 1000
            assert response.header("x-request-id")
    await gateway.settled([a], sent=0)


@pytest.mark.parametrize("name", [*NAMES, "m"])
async def test_b131_models_are_served_by_any_name(gateway: GatewayProcess, a: Fake, name: str) -> None:
    """The same names in a body: served, and the body is passed as it was."""
    request = chat(model=name)
    response = await ask(gateway.port, request)
    assert response.status == 200
    assert a.requests[0].body == request.partition(b"\r\n\r\n")[2]
    await gateway.settled([a], sent=1)


QUERIES = {
    "?purpose=a%20b&x=1&x=2&e=%2F%25": None,
    "?api-version=2024-06-01": None,
    "?beta=true": None,
    "?a=1&&b": None,
    "?a=b?c=d": None,
    "?%61=%c3%a9&+=+": None,
    "?": "",
    "": None,
    "?key=s3cret": "",
    "?api_key=s3cret&x=1": "?x=1",
    "?x=1&KEY=s3cret&y=2&token=s3cret": "?x=1&y=2",
    "?%6bey=s3cret&api%5Fkey=s3cret&x=1": "?x=1",
    "?access_token=s3cret&keys=1&monkey=2": "?keys=1&monkey=2",
}


async def test_b133_queries_arrive_as_sent(gateway: GatewayProcess, a: Fake) -> None:
    """Escapes, duplicates and order are the client's own; only credentials in a query stay here."""
    async with RawClient(gateway.port) as client:
        for query, expected in QUERIES.items():
            response = await client.ask(chat(path=f"/v1/chat/completions{query}"))
            assert response.status == 200, query
            target = "/v1/chat/completions" + (query if expected is None else expected)
            assert a.requests[-1].target == target
            assert "s3cret" not in repr(a.requests[-1])
    await gateway.settled([a], sent=len(QUERIES))


@pytest.mark.parametrize(
    "path", ["/v1/chat%2Fcompletions", "/v1/%63hat/completions", "http://elsewhere.example/v1/chat/completions"]
)
async def test_b133_an_endpoint_is_found_however_it_is_written(gateway: GatewayProcess, a: Fake, path: str) -> None:
    """Escaped or as a whole URL: the backend sees the plain path, and its own name as the host."""
    response = await ask(gateway.port, chat(path=f"{path}?x=%2F"))
    assert response.status == 200
    assert a.requests[0].target == "/v1/chat/completions?x=%2F"
    assert a.requests[0].header("host") == f"127.0.0.1:{a.port}"
    await gateway.settled([a], sent=1)


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions", "/chat/completions", "/v1/files"],
)
async def test_b133_a_path_that_leads_nowhere_is_told_so(gateway: GatewayProcess, a: Fake, path: str) -> None:
    """404 with a code of its own, and no backend is asked."""
    response = await ask(gateway.port, chat(path=path))
    assert (response.status, response.error()["code"]) == (404, "unknown_url")
    assert a.hits == 0
    await gateway.settled([a], sent=0)
