"""What a request asks for, and the bytes that go to the backend for it: any body is a call or refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.catalog import Canary, Catalog, Model, Tenant
from gateway.envelope import MAX_MEMBERS
from gateway.errors import Refused
from gateway.exchange import Call, Endpoint
from gateway.wire import ENDPOINTS, LIMITS, MOST_TOKENS, PRIVILEGED, PROMPT, parse

CHAT = ENDPOINTS["/v1/chat/completions"]
MESSAGES = ENDPOINTS["/v1/messages"]
EMBEDDINGS = ENDPOINTS["/v1/embeddings"]
SPEECH = ENDPOINTS["/v1/audio/transcriptions"]
FORM = b"multipart/form-data; boundary=b"

HALF = Canary("old", 0.5, b"seed", pool="new", by_conversation=True)
CATALOG = Catalog(
    [
        Model("plain", "p"),
        Model("named", "q", "upstream/name", aliases=("alias",)),
        Model("salted", "s", takes_salt=True),
        Model("uncounted", "u", counts_usage=False),
        Model("caseless", "c", ignores_case=True),
        Model(
            "split", "old", fallback=("spare",), canary=Canary("old", 0.5, b"seed", pool="new", by_conversation=True)
        ),
    ],
    created=1,
)
TENANT = Tenant("t", salt="SALT")
ONE = Tenant("one", models=("named",))


def asked(body: bytes | dict[str, Any], endpoint: Endpoint = CHAT, kind: bytes = b"", tenant: Tenant = TENANT) -> Call:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    return parse(endpoint, kind, data, CATALOG, tenant)


def sent(call: Call) -> bytes:
    data = b"".join(call.body)
    assert call.length == len(data)
    return data


def refused(body: bytes | dict[str, Any], *args: Any, **more: Any) -> tuple[int, str, str | None]:
    with pytest.raises(Refused) as error:
        asked(body, *args, **more)
    return error.value.refusal.status, error.value.refusal.code, error.value.param


def test_a_plain_request_is_read_and_not_touched() -> None:
    """Model, pool, stream, tier, limit and prompt; the body is the very object that came in."""
    body = b'{"model":"plain","messages":[{"x":1}],"tools":[2],"stream":false,"max_tokens":7,"service_tier":"flex"}'
    call = asked(body)
    assert (call.model, call.label, call.pool) == ("plain", "plain", "p")
    assert (call.stream, call.tier, call.max_tokens, call.strip_usage) == (False, "flex", 7, False)
    assert list(map(bytes, call.prompt)) == [b"[2]", b'[{"x":1}]']  # tools first: they come first for an engine
    assert call.body[0] is body


@pytest.mark.parametrize("name", ["named", "alias"])
def test_the_backends_own_name_is_put_in(name: str) -> None:
    """For a model and for its alias; nothing where the client used that name already, or named none."""
    assert sent(asked(b'{ "model" : "%b" }' % name.encode())) == b'{ "model" : "upstream/name" }'
    call = asked(b'{"model":"%b"}' % name.encode())
    assert (call.model, call.label, call.pool) == (name, "named", "q")
    assert sent(asked(b"{}", tenant=ONE)) == b"{}"
    assert sent(asked(b'{"model":null}', tenant=ONE)) == b'{"model":null}'


def test_a_request_without_a_model_gets_the_only_one() -> None:
    """Or is told to name one of several."""
    call = asked({"input": "x"}, EMBEDDINGS, tenant=ONE)
    assert (call.model, call.label, call.pool) == ("named", "named", "q")
    assert refused({"input": "x"}, EMBEDDINGS) == (400, "invalid_body", "model")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":""}', (400, "invalid_body", "model")),
        (b'{"model":7}', (400, "invalid_body", "model")),
        (b'{"model":["plain"]}', (400, "invalid_body", "model")),
        (b'{"model":"nope"}', (404, "model_not_found", "model")),
        (b'{"model":"Plain"}', (404, "model_not_found", "model")),
        (b'{"model":"upstream/name"}', (404, "model_not_found", "model")),
        (b'{"model":"\\ud83d"}', (404, "model_not_found", "model")),
        (b'{"model":"plain","stream":1}', (400, "invalid_body", "stream")),
        (b'{"model":"plain","stream":"true"}', (400, "invalid_body", "stream")),
        (b'{"model":"plain","service_tier":1}', (400, "invalid_body", "service_tier")),
        (b'{"model":"plain","model":"named"}', (400, "invalid_body", None)),
        (b'{"model":"plain","x":1,"x":2}', (400, "invalid_body", None)),
        (b'["model"]', (400, "invalid_body", None)),
        (b"", (400, "invalid_body", None)),
    ],
)
def test_what_cannot_be_asked(body: bytes, expected: tuple[int, str, str | None]) -> None:
    """Each with a code, and the field that is wrong."""
    assert refused(body) == expected


@pytest.mark.parametrize(
    "name", ["Model", "MODEL", "mODEL", "Cache_Salt", "cache_\u017falt", "\u212av_transfer_params"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_key_that_some_engines_take_for_another_is_refused(name: str, first: bool) -> None:
    """Go's decoder ignores case, as Unicode folds it: the engine would read a model that the gateway never saw."""
    body = {name: "named", "model": "caseless"} if first else {"model": "caseless", name: "named"}
    assert refused(body) == (400, "invalid_body", name.casefold())
    only = Tenant("t", models=("caseless",))
    assert refused({name: "named"}, tenant=only) == (400, "invalid_body", name.casefold())
    assert asked({"model": "caseless", "Modell": 1, "x": {name: 1}}).model == "caseless"
    assert json.loads(sent(asked(body | {"model": "plain"}))) == body | {"model": "plain"}  # others know the difference


def test_more_keys_than_anybody_needs() -> None:
    """The number of top-level keys has a limit."""
    keys = {f"k{number}": 1 for number in range(MAX_MEMBERS - 1)}
    assert asked({"model": "plain"} | keys).model == "plain"
    assert refused({"model": "plain", "one more": 1} | keys) == (400, "invalid_body", None)


@pytest.mark.parametrize("name", sorted(PRIVILEGED))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/tokenize"])
def test_fields_that_steer_engines_are_removed(name: str, path: str) -> None:
    """On every path; fields of the same name further inside are the client's own business."""
    body = {"model": "plain", name: -1, "x": {name: 1}}
    assert json.loads(sent(asked(body, ENDPOINTS[path]))) == {"model": "plain", "x": {name: 1}}


def test_the_salt_is_ours() -> None:
    """Over the client's own where engines keep caches apart by it, and only where tokens are generated."""
    assert json.loads(sent(asked({"model": "salted", "cache_salt": "of another"})))["cache_salt"] == "SALT"
    assert sent(asked(b'{"model":"salted"}')) == b'{"cache_salt":"SALT","model":"salted"}'
    assert b"salt" not in sent(asked({"model": "plain", "cache_salt": "of another"}))
    assert sent(asked(b'{"model":"salted"}', EMBEDDINGS)) == b'{"model":"salted"}'


@pytest.mark.parametrize("pool", ["old", "spare", "new"])
def test_who_must_be_kept_apart_is_refused_where_engines_drop_the_salt(pool: str) -> None:
    """vLLM and SGLang know no salt in a message: what one tenant asks there, another could find in the cache."""
    strict = Tenant("t", salt="SALT", apart=frozenset([pool]))
    assert refused({"model": "split"}, MESSAGES, tenant=strict) == (400, "invalid_request", None)
    assert asked({"model": "split"}, CHAT, tenant=strict).pool in ("old", "new")
    assert asked({"model": "plain"}, MESSAGES, tenant=strict).pool == "p"


ASKED = {"include_usage": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, ASKED), ({}, ASKED), (ASKED, ASKED), ({"include_usage": False}, ASKED), ({"x": 1}, {"x": 1} | ASKED)],
)
def test_streams_are_made_to_report_usage(options: Any, expected: Any) -> None:
    """However the client put it; the chunk is taken out again unless the client itself asked."""
    call = asked({"model": "plain", "stream": True, "stream_options": options})
    assert json.loads(sent(call))["stream_options"] == expected
    assert call.strip_usage == (options != ASKED)


@pytest.mark.parametrize("value", ["true", 1, "yes", 1.0, "no", [], "\ud800"])
def test_a_wish_for_usage_in_words_of_its_own_is_left_alone(value: object) -> None:
    """Pydantic takes many things for true: the chunk that the client asked for so must not be taken out."""
    body = {"model": "plain", "stream": True, "stream_options": {"include_usage": value}}
    call = asked(body)
    assert (json.loads(sent(call)), call.strip_usage) == (body, False)


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"model": "plain", "stream": False}, CHAT),
        ({"model": "plain"}, CHAT),
        ({"model": "uncounted", "stream": True}, CHAT),
        ({"model": "plain", "stream": True}, MESSAGES),
        ({"model": "plain", "stream": True}, ENDPOINTS["/v1/responses"]),
        ({"model": "plain", "stream": True, "stream_options": [1]}, CHAT),
    ],
)
def test_nobody_else_is_asked_for_usage(body: dict[str, Any], endpoint: Endpoint) -> None:
    """No stream, an engine that does not know how, another dialect, options that the engine had better judge."""
    call = asked(body, endpoint)
    assert json.loads(sent(call)) == body
    assert not call.strip_usage


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_output_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": -1}, 0),
        ({"max_tokens": None}, None),
        ({"max_tokens": "many", "max_output_tokens": 6}, 6),
        ({"max_tokens": 1.5}, None),
        ({"max_tokens": 10**30}, MOST_TOKENS),
    ],
)
def test_the_limit_of_the_output(fields: dict[str, Any], limit: int | None) -> None:
    """The first that is a whole number, the newest name before the older ones."""
    assert asked({"model": "plain"} | fields).max_tokens == limit


def form(*fields: tuple[bytes, bytes]) -> bytes:
    parts = (b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % field for field in fields)
    return b"".join(parts) + b"--b--\r\n"


FILE = (b"file", bytes(range(256)) + b"\r\n--a")


def test_forms_are_read_like_objects() -> None:
    """The model by any of its names, the stream flag as pydantic has it; the file is not touched."""
    call = asked(form(FILE, (b"model", b"alias"), (b"stream", b"True")), SPEECH, FORM)
    assert (call.model, call.label, call.pool, call.stream) == ("alias", "named", "q", True)
    assert sent(call) == form(FILE, (b"model", b"upstream/name"), (b"stream", b"True"))
    body = form((b"model", b"plain"), FILE)
    assert asked(body, SPEECH, FORM).body == [body]


def test_fields_that_steer_engines_are_removed_from_forms() -> None:
    """Wherever they stand."""
    body = form((b"priority", b"-1"), (b"model", b"named"), FILE, (b"cache_salt", b"x"), (b"rid", b""))
    assert sent(asked(body, SPEECH, FORM)) == form((b"model", b"upstream/name"), FILE)


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (form(FILE), FORM, (400, "invalid_body", "model")),
        (form((b"model", b"plain"), (b"model", b"named")), FORM, (400, "invalid_body", "model")),
        (form((b"model", b"")), FORM, (400, "invalid_body", "model")),
        (form((b"model", b"nope")), FORM, (404, "model_not_found", "model")),
        (form((b"model", b"\xff")), FORM, (404, "model_not_found", "model")),
        (form((b"model", b"plain"))[:-5], FORM, (400, "invalid_body", None)),
        (form((b"model", b"plain")), b"multipart/form-data", (400, "invalid_body", None)),
        (form((b"model", b"plain")), b"application/json", (400, "invalid_body", None)),
        (form(*[(b"x", b"")] * 1000), FORM, (413, "request_too_large", None)),
    ],
)
def test_forms_that_cannot_be_read(body: bytes, kind: bytes, expected: tuple[int, str, str | None]) -> None:
    """As for objects; a flood of parts is too large."""
    assert refused(body, SPEECH, kind) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["plain", "named"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
INTERESTING = ["model", "stream", "stream_options", "service_tier", "messages", "cache_salt", "priority", *LIMITS]
KEYS = st.sampled_from(INTERESTING) | st.text(max_size=5)
MODELS = st.sampled_from(["plain", "named", "alias", "salted", "uncounted"])


@settings(max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.sampled_from(sorted(ENDPOINTS)), MODELS | st.none(), st.booleans())
def test_any_object_is_a_call_or_refused(body: dict[str, Any], path: str, model: str | None, escaped: bool) -> None:
    """Never another exception; and what is sent is the client's object but for the edits that are ours to make."""
    if model is not None:
        body["model"] = model
    data = json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    try:
        call = parse(ENDPOINTS[path], b"application/json", data, CATALOG, TENANT)
    except Refused:
        return
    expected = {name: value for name, value in json.loads(data).items() if name not in PRIVILEGED}
    arrived = json.loads(sent(call))
    for name in ("model", "stream_options", "cache_salt"):
        if arrived.get(name) != expected.get(name):
            expected.pop(name, None)
            arrived.pop(name)
    assert repr(arrived) == repr(expected)
    assert call.label in ("plain", "named", "salted", "uncounted")
    assert [name for name in PROMPT if name in body] or not call.prompt


@given(st.binary(max_size=80), st.sampled_from([b"", b"application/json", FORM, b"multipart/form-data"]))
@example(b'{"model":"plain","max_tokens":' + b"9" * 5000 + b"}", b"")
@example(b'{"model":"plain","stream":true,"stream_options":{"\\ud83d":1}}', b"")
@example(b'{"model":"plain","stream":true,"stream_options":' + b"[" * 500 + b"]" * 500 + b"}", b"")
@example(b'{"model":"\\ud83d\\ude00"}', b"")
def test_any_bytes_are_a_call_or_refused(body: bytes, kind: bytes) -> None:
    """Never another exception."""
    with suppress(Refused):
        assert sent(parse(CHAT, kind, body, CATALOG, TENANT))


@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_conversation_keeps_its_version_while_it_grows(field: str) -> None:
    """Chat and Anthropic messages, and the items of a response: half of the conversations have each version, for good;
    the old pool stands in for the new one."""
    ways = []
    for number in range(40):
        talk: list[dict[str, str]] = [{"role": "user", "content": f"question {number}"}]
        first = asked({"model": "split", field: talk})
        talk += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
        grown = asked({"model": "split", field: talk, "stream": True, "temperature": 0.5})
        assert first.pool == grown.pool
        ways.append((grown.pool, grown.fallback))
    assert set(ways) == {("new", ("old", "spare")), ("old", ("spare",))}
    assert 8 < ways.count(("old", ("spare",))) < 32


@pytest.mark.parametrize(
    "members",
    [{}, {"prompt": "x"}, {"input": "x"}, {"messages": []}, {"messages": [1, {}]}, {"messages": None}],
    ids=str,
)
def test_what_is_no_list_of_messages_has_a_version_too(members: dict[str, Any]) -> None:
    """The same one each time; the engine is to judge the body."""
    pools = {asked({"model": "split"} | members).pool for _ in range(3)}
    assert len(pools) == 1
