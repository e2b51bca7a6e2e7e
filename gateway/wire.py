"""What a request asks for, read from its head and body without I/O, and the bytes that go to the backend for it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway import envelope, multipart
from gateway.catalog import Canary, Catalog, Model, Tenant
from gateway.envelope import Envelope, Piece
from gateway.errors import INVALID_BODY, INVALID_REQUEST, MODEL_NOT_FOUND, REQUEST_TOO_LARGE, Refused
from gateway.exchange import Call, Dialect, Endpoint

ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", Dialect.CHAT, generates=True),
        Endpoint("/v1/completions", Dialect.COMPLETIONS, generates=True),
        Endpoint("/v1/responses", Dialect.RESPONSES, generates=True),
        # vLLM and SGLang make a chat of it, and drop the salt on the way.
        Endpoint("/v1/messages", Dialect.MESSAGES, generates=True, salts=False),
        Endpoint("/v1/messages/count_tokens", Dialect.MESSAGES),
        Endpoint("/v1/embeddings"),
        Endpoint("/v1/rerank"),
        Endpoint("/v1/score"),
        Endpoint("/v1/audio/speech"),
        Endpoint("/v1/audio/transcriptions"),
        Endpoint("/v1/audio/translations"),
        Endpoint("/v1/images/generations"),
        Endpoint("/v1/images/edits"),
        Endpoint("/tokenize"),
        Endpoint("/detokenize"),
    )
}

# Fields that steer an engine's scheduler, cache or placement, or run code in it. They are the operator's to set:
# vLLM and SGLang take them from anybody.
PRIVILEGED = frozenset(
    (
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "cache_salt",
        "custom_labels",
        "custom_logit_processor",
        "data_parallel_rank",
        "ec_transfer_params",
        "extra_body",
        "extra_key",
        "kv_transfer_params",
        "logits_processors",
        "lora_path",
        "priority",
        "request_id",
        "rid",
        "routed_dp_rank",
        "session_params",
    )
)
OURS = PRIVILEGED | {"model"}  # what must mean the same to us and to an engine
# What engines make the prompt of, roughly in their order: what comes first is what requests share.
PROMPT = ("tools", "system", "instructions", "messages", "prompt", "input", "query", "documents", "content")
TRUTHS = frozenset((b"true", b"1", b"yes", b"on", b"t", b"y"))  # what pydantic takes for true in a form
MOST_TOKENS = 2**31  # of an answer: no engine counts further
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Speaker(msgspec.Struct):
    """Of a message only whose it is."""

    role: str | None = None


NULL, TRUE, FALSE = (msgspec.Raw(word) for word in (b"null", b"true", b"false"))

_text = msgspec.json.Decoder(str).decode
_whole = msgspec.json.Decoder(int).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_role = msgspec.json.Decoder(Speaker).decode
_write = msgspec.json.Encoder().encode


def parse(endpoint: Endpoint, content_type: bytes, body: bytes, catalog: Catalog, tenant: Tenant) -> Call:
    """Raises Refused: invalid_body, request_too_large, model_not_found."""
    if content_type[:10].lower() == b"multipart/":
        return _parse_form(endpoint, content_type, body, catalog, tenant)
    try:
        sent = envelope.read(body)
    except envelope.BadBody as error:
        raise Refused(INVALID_BODY, str(error)) from None
    members = sent.members
    asked = _string(members, "model")
    model = _find(endpoint, asked, catalog, tenant)
    if model.ignores_case:
        _check_case(members)
    stream = _flag(members, "stream")
    edits: dict[str, bytes] = {}
    if asked is not None and model.upstream_name not in (None, asked):
        edits["model"] = _write(model.upstream_name)
    asks_usage = stream and model.counts_usage and endpoint.dialect in (Dialect.CHAT, Dialect.COMPLETIONS)
    if asks_usage and (options := _usage_asked(members)) is not None:
        edits["stream_options"] = options
    if tenant.salt and model.takes_salt and endpoint.generates:
        edits["cache_salt"] = b'"%b"' % tenant.salt.encode()
    call = Call(
        endpoint,
        model=asked or model.name,
        label=model.label,
        pool=model.pool,
        fallback=model.fallback,
        body=_spliced(sent, edits),
        stream=stream,
        strip_usage="stream_options" in edits,
        tier=_string(members, "service_tier"),
        prompt=[memoryview(members[name]) for name in PROMPT if name in members],
        max_tokens=_output_limit(members),
    )
    return call if model.canary is None else _assigned(call, model.canary, tenant, members)


def _check_case(members: Mapping[str, msgspec.Raw]) -> None:
    """Go's decoder, and so Ollama, takes `Model` for `model`: it would serve another one than the tenant may use."""
    names = "".join(members)
    if names.isascii() and names.islower():  # as nearly all are
        return
    for name in members:
        if name not in OURS and (right := name.casefold()) in OURS:
            raise Refused(INVALID_BODY, f"The key {name!r} must be written {right!r}.", param=right)


def _assigned(call: Call, canary: Canary, tenant: Tenant, members: Mapping[str, msgspec.Raw]) -> Call:
    """The call with the version of its model that it is to try first. The old one stands in for a new pool."""
    new = canary.takes(tenant.name, _conversation(members) if canary.by_conversation else b"")
    call.canary = canary
    if canary.backends:
        call.among = (canary.backends, new)
    elif new:
        call.pool, call.fallback = canary.pool, (call.pool, *call.fallback)
    return call


def _conversation(members: Mapping[str, msgspec.Raw]) -> bytes:
    """What stays the same while a conversation grows: all up to the first words of its user. The whole prompt where it
    is no list of messages."""
    for name in ("messages", "input", "prompt"):
        if name in members:
            try:
                messages = _list(members[name])
                roles = [_role(message).role for message in messages]
            except msgspec.DecodeError:
                return bytes(members[name])
            first = roles.index("user") if "user" in roles else len(roles)
            return b",".join(map(bytes, messages[: first + 1]))
    return b""


def _spliced(sent: Envelope, edits: Mapping[str, bytes]) -> list[Piece]:
    if not edits and PRIVILEGED.isdisjoint(sent.members):
        return [sent.body]
    return sent.splice(edits, PRIVILEGED - edits.keys())


def _output_limit(members: Mapping[str, msgspec.Raw]) -> int | None:
    for name in LIMITS:
        if name in members and (limit := _count(members[name])) is not None:
            return limit
    return None


def _find(endpoint: Endpoint, asked: str | None, catalog: Catalog, tenant: Tenant) -> Model:
    if asked == "":
        raise Refused(INVALID_BODY, "The model must not be empty.", param="model")
    model = catalog.default(tenant) if asked is None else catalog.find(tenant, asked)
    if model is not None:
        if not endpoint.salts and not tenant.apart.isdisjoint(model.pools):
            message = f"{endpoint.path} cannot keep this tenant's prompts apart: ask /v1/chat/completions."
            raise Refused(INVALID_REQUEST, message)
        return model
    if asked is None:
        raise Refused(INVALID_BODY, f"You must provide a model parameter to {endpoint.path}.", param="model")
    raise Refused(MODEL_NOT_FOUND, not_found(asked), param="model")


def not_found(name: str) -> str:
    """The same for a model that does not exist and one that the tenant may not see. Of a long name only the start."""
    return f"The model {name[:200]!r} does not exist or you do not have access to it."


def _usage_asked(members: Mapping[str, msgspec.Raw]) -> bytes | None:
    """`stream_options` that make the engine report usage; None where the client's own already do, or where they
    are something that the engine had better refuse itself."""
    sent = members.get("stream_options")
    if sent is None or sent == NULL:
        return b'{"include_usage":true}'
    try:
        options = _members(sent)
    except msgspec.DecodeError:
        return None
    if options.get("include_usage", NULL) not in (FALSE, NULL):
        return None
    return _write(options | {"include_usage": True})


def _string(members: Mapping[str, msgspec.Raw], name: str) -> str | None:
    """None for a member that is absent or null."""
    raw = members.get(name)
    if raw is None or raw == NULL:
        return None
    try:
        return _text(raw)
    except msgspec.DecodeError:
        raise Refused(INVALID_BODY, f"{name!r} must be a string.", param=name) from None


def _flag(members: Mapping[str, msgspec.Raw], name: str) -> bool:
    raw = members.get(name)
    if raw is None or raw in (FALSE, NULL):
        return False
    if raw == TRUE:
        return True
    raise Refused(INVALID_BODY, f"{name!r} must be true or false.", param=name)


def _count(raw: msgspec.Raw) -> int | None:
    """None where the engine had better judge: null, negative, or not a whole number."""
    try:
        return min(MOST_TOKENS, max(0, _whole(raw)))
    except msgspec.DecodeError:
        return None


def _parse_form(endpoint: Endpoint, content_type: bytes, body: bytes, catalog: Catalog, tenant: Tenant) -> Call:
    try:
        fields = multipart.parts(body, multipart.boundary(content_type))
    except multipart.BadForm as error:
        raise Refused(REQUEST_TOO_LARGE if error.flood else INVALID_BODY, str(error)) from None
    named = [part for part in fields if part.name == "model"]
    if len(named) > 1:
        raise Refused(INVALID_BODY, "The form names the model more than once.", param="model")
    asked = body[named[0].start : named[0].end].decode("utf-8", "replace") if named else None
    model = _find(endpoint, asked, catalog, tenant)
    edits = [(part.first, part.last, b"") for part in fields if part.name in PRIVILEGED]
    if named and model.upstream_name is not None and model.upstream_name != asked:
        edits.append((named[0].start, named[0].end, model.upstream_name.encode()))
    stream = any(body[part.start : part.end].lower() in TRUTHS for part in fields if part.name == "stream")
    call = Call(
        endpoint,
        model=asked or model.name,
        label=model.label,
        pool=model.pool,
        fallback=model.fallback,
        body=envelope.patched(body, sorted(edits)),
        stream=stream,
    )
    return call if model.canary is None else _assigned(call, model.canary, tenant, {})
