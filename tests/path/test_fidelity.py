"""Bytes pass through: what arrives at the backend is what was sent, but for the few bytes that had to be spliced, and
what comes back is what the backend said."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from gateway.isolation import salt
from tests.faults.fakes import DONE, Fake, FakeConnection, completion, event, healthy, usage_event
from tests.faults.process import DIGEST, KEY, GatewayProcess, pool
from tests.faults.rawclient import RawClient, post

pytestmark = pytest.mark.anyio

CORPUS = Path(__file__).parent / "corpus"
LONGER, SHORTER = "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8-中文", "x"
SECRET = "of-the-tests-of-fidelity-and-nothing-else"
AUTHORIZED = f"Authorization: Bearer {KEY}"


def generated() -> Iterator[tuple[str, bytes]]:
    """What is too large for a file."""
    rng = Random(7)
    image = b"data:image/png;base64," + rng.randbytes(5 * 2**20 * 3 // 4).hex().encode()[: 5 * 2**20]
    part = b'{"type":"image_url","image_url":{"url":"%b"}}' % image
    yield "image of 5 MiB", b'{"model":"m","messages":[{"role":"user","content":[%b]}]}' % part
    schema = b'{"type":"object","properties":{"n":{"const":%d.50}}}'
    tool = b'{"type":"function","function":{"name":"f%d","parameters":' + schema + b"}}"
    yield "200 tools", b'{"tools":[%b],"messages":[],"model":"m"}' % b",".join(tool % (n, n) for n in range(200))
    yield "400 deep", b'{"model":"m","x":' + b'[{"a":' * 200 + b"null" + b"}]" * 200 + b',"messages":[]}'
    turns = [
        b'{"role":"user","content":"%b \\u00e9 \xc3\xa9"}' % rng.randbytes(400).hex().encode() for _ in range(3000)
    ]
    yield "3,000 turns", b'{ "model" : "m", "messages":[%b]}' % b" ,\n".join(turns)
    fields = b",".join(b'"field%d":%d' % (number, number) for number in range(500))
    yield "500 fields", b'{%b,"model":"m","messages":[]}' % fields


BODIES = {path.stem: path.read_bytes() for path in sorted(CORPUS.iterdir())} | dict(generated())


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The tests share a gateway, and so a loop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def stage(
    anyio_backend: object, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[GatewayProcess, Fake]]:
    """Model `m` needs no edit; `longer` and `shorter` are called otherwise upstream; `salted` stands on engines that
    take a salt."""
    async with Fake(healthy) as fake:
        config = pool(fake.url, engine="sglang", isolation=False, tenants={"t": {"keys": [{"sha256": DIGEST}]}})
        config["pools"]["salted"] = pool(fake.url)["pools"]["p"]
        config["models"] |= {
            "longer": {"pool": "p", "upstream_name": LONGER},
            "shorter": {"pool": "p", "upstream_name": SHORTER},
            "salted": {"pool": "salted"},
        }
        config["models"]["m"]["pool"] = "p"
        config["security"] = {"secret": "env:FIDELITY_SECRET"}
        folder = tmp_path_factory.mktemp("gateway")
        async with GatewayProcess(config, folder, {"FIDELITY_SECRET": SECRET}) as gateway:
            yield gateway, fake


async def answering(connection: FakeConnection) -> None:
    """Whatever it is asked."""
    while True:
        await connection.request()
        await connection.answer(completion())


class Client:
    """Sends bodies and says what arrived."""

    def __init__(self, connection: RawClient, fake: Fake) -> None:
        self._connection = connection
        self._fake = fake

    async def arrives(self, body: bytes, path: str = "/v1/chat/completions") -> bytes:
        """What the backend got; its length was declared, and declared once."""
        response = await self._connection.ask(post(body, path, AUTHORIZED))
        assert response.status == 200, response.body
        request = self._fake.requests.pop()
        assert request.header("content-length") == str(len(request.body))
        return request.body


@pytest.fixture
async def client(stage: tuple[GatewayProcess, Fake]) -> AsyncIterator[Client]:
    gateway, fake = stage
    await fake.play(answering)
    await gateway.begin()
    async with RawClient(gateway.port) as connection:
        yield Client(connection, fake)
    await gateway.settled([fake])


def of(body: bytes, model: str) -> bytes:
    """The body of the corpus for another model."""
    assert body.count(b'"m"') == 1
    return body.replace(b'"m"', json.dumps(model, ensure_ascii=False).encode())


def inside(body: bytes, members: bytes) -> bytes:
    """The body with more members at its end."""
    end = body.rindex(b"}")
    return body[:end] + b"," + members + body[end:]


async def test_what_needs_no_edit_arrives_as_sent(client: Client) -> None:
    """The same digest at the backend as at the client."""
    for name, body in BODIES.items():
        assert sha256(await client.arrives(body)).digest() == sha256(body).digest(), name


@pytest.mark.parametrize(("alias", "upstream"), [("longer", LONGER), ("shorter", SHORTER)])
async def test_a_new_name_is_the_only_difference(client: Client, alias: str, upstream: str) -> None:
    """A model that the backends call otherwise: its value is replaced, wherever it stands, and nothing else."""
    for name, body in BODIES.items():
        assert await client.arrives(of(body, alias)) == of(body, upstream), name


ASKED = b'{"include_usage":true}'
OPTIONS = {
    "absent": (b"", b""),
    "null": (b',"stream_options": null ', b',"stream_options": %b ' % ASKED),
    "empty": (b', "stream_options":{}', b', "stream_options":%b' % ASKED),
    "true": (b',"stream_options":{ "include_usage" : true }', b',"stream_options":{ "include_usage" : true }'),
    "false": (b',"stream_options":{"include_usage":false}', b',"stream_options":%b' % ASKED),
    "more": (
        b',"stream_options":{"x":1.0,"include_usage":false,"y":[ 1e400 ]}',
        b',"stream_options":{"x":1.0,"include_usage":true,"y":[ 1e400 ]}',
    ),
    "no object": (b',"stream_options":[1]', b',"stream_options":[1]'),
}


@pytest.mark.parametrize("form", OPTIONS)
async def test_asking_for_usage_is_the_only_difference(client: Client, form: str) -> None:
    """In whatever form a stream gives its options: they are added in front or replaced where they stand."""
    sent, expected = OPTIONS[form]
    for name, body in BODIES.items():
        if b'"stream"' in body and b'"stream":null' in body:
            continue  # it has both members already
        arrived = await client.arrives(inside(body, b'"stream":true' + sent))
        whole = inside(body, b'"stream":true' + expected)
        if form == "absent":
            start = whole.index(b"{") + 1
            whole = whole[:start] + b'"stream_options":' + ASKED + b"," + whole[start:]
        assert arrived == whole, name


PRIVILEGED = [b'"priority":-5', b'"kv_transfer_params" : {"a":[1,{"b":"}"}]}', b'"cache_salt":"of another"']


@pytest.mark.parametrize("member", PRIVILEGED)
async def test_a_privileged_field_is_the_only_difference(client: Client, member: bytes) -> None:
    """At the beginning it goes with what separates it from the next, at the end with what separates it from the one
    before; further inside fields of the same name stay."""
    blank = b" \t\r\n"
    for name, body in BODIES.items():
        start, end = body.index(b"{") + 1, body.rindex(b"}")
        first = body[:start] + b" \n" + member + b" ,\t" + body[start:]
        assert await client.arrives(first) == body[:start] + b" \n" + body[start:].lstrip(blank), name
        last = body[:end] + b"\t," + member + body[end:]
        assert await client.arrives(last) == body[:end].rstrip(blank) + body[end:], name


async def test_all_edits_at_once(client: Client) -> None:
    """A new name, usage, a field removed, and the salt over the client's own: each where it stands."""
    for name, body in BODIES.items():
        if b'"stream":null' in body:
            continue
        sent = inside(of(body, "longer"), b'"priority":1,"stream":true,"stream_options":{}')
        expected = inside(of(body, LONGER), b'"stream":true,"stream_options":%b' % ASKED)
        assert await client.arrives(sent) == expected, name
    secret = salt(SECRET.encode(), "t").encode()
    for name, body in BODIES.items():
        sent = inside(of(body, "salted"), b'"cache_salt" : "of another"')
        assert await client.arrives(sent) == inside(of(body, "salted"), b'"cache_salt" : "%b"' % secret), name
        start = body.index(b"{") + 1
        salted = of(body, "salted")
        expected = salted[:start] + b'"cache_salt":"%b",' % secret + salted[start:]
        assert await client.arrives(salted) == expected, name


ODD_ANSWER = (
    b' {"id":"c", "choices":[{"index":0,"message":{"content":"\\ud83d \\u0000 \xe4\xbd\xa0"},"finish_reason":"stop"}],'
    b'\r\n"x_vendor":{"a":[null,1.0,1e400,18446744073709551617]},"usage":{"prompt_tokens":1,"completion_tokens":1}} '
)
LARGE = Random(8).randbytes(5 * 2**20)
ANSWERS = {
    "odd JSON": ("application/json", ODD_ANSWER),
    "JSON of 5 MiB": ("application/json", b'{"data":[{"embedding":"' + LARGE.hex().encode() + b'"}]}'),
    "ordinary": ("application/json; charset=utf-8", completion()),
    "audio": ("audio/mpeg", LARGE),
    "image": ("image/png", LARGE[:100_000]),
    "text": ("text/plain", "grüße 你好\r\n".encode() * 10),
    "odd type": ('application/x-ndjson;a="b;c"', b'{"a":1}\n{"b":2}\n'),
    "nothing": ("application/json", b""),
    "one byte": ("application/octet-stream", b"\0"),
}
EVENTS = (
    b"\xef\xbb\xbf: comment\r\n\r\n"
    + event("one")
    + b"retry: 10\nid: 7\n\n"
    + event("\u2028\0").replace(b"\n\n", b"\r\n\r\n")
)
EVENTS += (
    b"event: odd\ndata: {not json\n\n" + b'data:{"choices":[{"delta":{"content":"' + b"A" * 3_000_000 + b'"}}]}\n\n'
)
EVENTS += event(finish="stop") + usage_event() + DONE
ANSWERS["events"] = ("text/event-stream; charset=utf-8", EVENTS)


@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_answers_come_back_as_they_were(stage: tuple[GatewayProcess, Fake], kind: str, framing: str) -> None:
    """Any content type, odd numbers, unknown fields, 5 MiB, however framed: type and bytes are the backend's."""
    gateway, fake = stage
    content_type, body = ANSWERS[kind]
    rng = Random(9)

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        if framing == "length":
            await connection.head(content_type=content_type, content_length=str(len(body)))
            await connection.send(body)
            connection.finish()
        elif framing == "close":
            await connection.head(content_type=content_type, connection="close")
            await connection.send(body)
            connection.fin()
        else:
            await connection.stream_head(content_type)
            start = 0
            while start < len(body):
                size = rng.choice([1, 7, 1000, 70_000])
                await connection.chunk(body[start : start + size])
                start += size
            await connection.last_chunk()

    await fake.play(script)
    await gateway.begin()
    options = {"stream": True, "stream_options": {"include_usage": True}} if kind == "events" else {}
    async with RawClient(gateway.port) as client:
        response = await client.ask(post({"model": "m", "messages": []} | options, "/v1/chat/completions", AUTHORIZED))
    assert (response.status, response.complete) == (200, True)
    assert response.header("content-type") == content_type
    assert sha256(response.body).digest() == sha256(body).digest()
    await gateway.settled([fake], sent=1)
