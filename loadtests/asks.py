"""What a client asks an engine for, in any of the four generating dialects, as one thing: an Ask. No I/O.

Checks are those that vLLM makes and words them as it does: a client's code sees the errors it will see in production.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadtests import prose

Json = dict[str, Any]
# Four bytes each: one token, as a chat template's special tokens are.
ROLES = {"system": b"<sy>", "developer": b"<sy>", "user": b"<us>", "assistant": b"<as>", "tool": b"<to>"}
END_OF_TURN = b"<eo>"
MAX_CHOICES = 128


class InvalidAsk(Exception):
    """The engine refuses: HTTP status, vLLM's error type, the parameter at fault."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Each of `prompts` is rendered to whole tokens and is answered `n` times.

    `tool` is the function that must be called, with the JSON schema of its arguments.
    """

    model: str
    prompts: list[bytes]
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    salt: str | None = None
    seed: int = 0
    stream: bool = False
    include_usage: bool = False
    tool: tuple[str, Json] | None = None
    raw: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """The names that the engine serves one model under, the first being its own, and its context in tokens."""

    names: tuple[str, ...]
    max_len: int

    def check(self, name: object) -> str:
        if name not in self.names:
            text = f"The model `{name}` does not exist. Valid aliases: {', '.join(self.names)}."
            raise InvalidAsk(text, status=404, kind="NotFoundError", param="model")
        return str(name)


def document(body: bytes) -> Json:
    """The JSON object of a request."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as exc:
        detail = {"type": "json_invalid", "loc": "body.1", "msg": "JSON decode error", "ctx": {"error": str(exc)}}
        raise InvalidAsk(f"1 validation error:\n  {detail}", kind="Bad Request", param="body.1") from exc
    if not isinstance(found, dict):
        raise invalid("body", "model_attributes_type", "Input should be a valid dictionary")
    return found


def invalid(where: str, kind: str, why: str) -> InvalidAsk:
    """A field of the wrong shape, as pydantic words it."""
    detail = {"type": kind, "loc": f"body.{where}", "msg": why}
    return InvalidAsk(f"1 validation error:\n  {detail}", kind="Bad Request", param=f"body.{where}")


def required(raw: Json, name: str) -> Any:
    if raw.get(name) is None:
        raise invalid(name, "missing", "Field required")
    return raw[name]


def whole(raw: Json, name: str, least: int = 0) -> int | None:
    """An integer of at least `least`, or None where it is absent."""
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(name, "int_type", "Input should be a valid integer")
    if value < least:
        text = f"{name} must be at least {least}, got {value}. (parameter={name}, value={value})"
        raise InvalidAsk(text, param=name)
    return value


def text(content: object, where: str) -> bytes:
    """The content of a message: a string or a list of parts; images count as what they are."""
    if content is None:
        return b""
    if isinstance(content, str):
        return prose.padded(content.encode("utf-8", "surrogatepass"))
    if not isinstance(content, list):
        raise invalid(where, "string_type", "Input should be a valid string")
    return b"".join(_part(part, where) for part in content)


def _part(part: object, where: str) -> bytes:
    if isinstance(part, str):
        return text(part, where)
    if not isinstance(part, dict):
        raise invalid(where, "dict_type", "Input should be a valid dictionary")
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return text(part.get("text"), where)
        case "image_url" | "input_image" | "image" | "input_audio":
            return prose.image(json.dumps(part))
        case "tool_result":
            return text(part.get("content"), where)
        case _:
            return text(json.dumps(part), where)


def conversation(messages: object, tools: object, where: str) -> bytes:
    """Messages as a chat template renders them, up to where the answer begins."""
    if not isinstance(messages, list):
        raise invalid(where, "list_type", "Input should be a valid list")
    if not messages:
        raise InvalidAsk(f"{where} must not be empty", param=where)
    turns = [ROLES["system"] + text(json.dumps(tools), "tools") + END_OF_TURN] if tools else []
    for number, message in enumerate(messages):
        at = f"{where}.{number}"
        if not isinstance(message, dict):
            raise invalid(at, "dict_type", "Input should be a valid dictionary")
        said = text(message.get("content"), f"{at}.content")
        for extra in ("tool_calls", "output", "arguments"):
            if message.get(extra):
                said += text(json.dumps(message[extra]), at)
        role = message.get("role", "tool" if "output" in message else "assistant")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{at}.role", "literal_error", f"Unexpected message role {role!r}")
        turns.append(ROLES[role] + said + END_OF_TURN)
    return b"".join(turns) + ROLES["assistant"]


def prompts(raw: Json) -> list[bytes]:
    """`prompt` of a completion, or `input` of an embedding: a text, texts, tokens, or lists of tokens."""
    name = "prompt" if "prompt" in raw else "input"
    given = required(raw, name)
    many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    return [_prompt(one, name) for one in many]


def _prompt(one: object, name: str) -> bytes:
    if isinstance(one, str) and one:
        return text(one, name)
    if isinstance(one, list) and one and all(isinstance(token, int) and 0 <= token < 1 << 32 for token in one):
        return b"".join(token.to_bytes(prose.TOKEN_BYTES, "big") for token in one)
    raise InvalidAsk(f"Either a non-empty text or non-empty tokens are required. (parameter={name})", param=name)


def sampling(raw: Json, model: Model, limit: str, rendered: list[bytes]) -> Json:
    """The fields of an Ask that all dialects share. `limit` is the dialect's name of the most tokens to generate."""
    temperature = raw.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        text_ = f"temperature must be non-negative, got {temperature}. (parameter=temperature, value={temperature})"
        raise InvalidAsk(text_, param="temperature")
    most = whole(raw, limit, 1)
    if most is not None and most > model.max_len:
        text_ = (
            f"{limit}={most} cannot be greater than max_model_len={model.max_len}. Please request fewer output tokens."
        )
        raise InvalidAsk(f"{text_} (parameter={limit}, value={most})", param=limit)
    longest = max(map(prose.token_count, rendered))
    if longest + (most or 1) > model.max_len:
        text_ = (
            f"This model's maximum context length is {model.max_len} tokens. However, you requested {most or 1} output "
            f"tokens and your prompt contains {longest} input tokens, for a total of {longest + (most or 1)} tokens."
        )
        raise InvalidAsk(text_, param="input_tokens")
    salt = raw.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise InvalidAsk("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    return {
        "model": model.check(raw.get("model", model.names[0])),
        "prompts": rendered,
        "max_tokens": most,
        "min_tokens": whole(raw, "min_tokens") or 0,
        "ignore_eos": bool(raw.get("ignore_eos")),
        "salt": salt,
        "seed": whole(raw, "seed", -(2**63)) or 0,
        "stream": bool(raw.get("stream")),
        "raw": raw,
    }


def choices(raw: Json) -> int:
    n = whole(raw, "n", 1) or 1
    if n > MAX_CHOICES:
        raise InvalidAsk(f"n must be at most {MAX_CHOICES}, got {n}.", param="n")
    return n


def wants_usage(raw: Json) -> bool:
    """`stream_options`, as vLLM reads it: an empty object means yes."""
    options = raw.get("stream_options")
    if options is None:
        return False
    if not raw.get("stream"):
        raise InvalidAsk("Stream options can only be defined when `stream=True`.", param="stream_options")
    return bool(options.get("include_usage", True)) if isinstance(options, dict) else False


def forced_tool(raw: Json) -> tuple[str, Json] | None:
    """The function that `tool_choice` forces, in any dialect; None where the model may choose to speak instead."""
    choice, tools = raw.get("tool_choice"), raw.get("tools")
    if not tools or choice in (None, "none", "auto"):
        return None
    name = None
    if isinstance(choice, dict):
        if choice.get("type") in ("none", "auto"):
            return None
        name = (choice.get("function") or choice).get("name")
    for tool in tools:
        function = tool.get("function", tool)
        if name in (None, function.get("name")):
            schema = function.get("parameters") or function.get("input_schema") or {}
            return str(function.get("name")), schema
    raise InvalidAsk(
        f"The tool specified in `tool_choice` does not match any of the tools: {name}", param="tool_choice"
    )


def chat(raw: Json, model: Model) -> Ask:
    model.check(raw.get("model", model.names[0]))
    rendered = conversation(required(raw, "messages"), raw.get("tools"), "messages")
    limit = "max_tokens" if raw.get("max_completion_tokens") is None else "max_completion_tokens"
    shared = sampling(raw, model, limit, [rendered])
    return Ask(**shared, n=choices(raw), include_usage=wants_usage(raw), tool=forced_tool(raw))


def completion(raw: Json, model: Model) -> Ask:
    model.check(raw.get("model", model.names[0]))
    shared = sampling({"max_tokens": 16, **raw}, model, "max_tokens", prompts(raw))
    return Ask(**shared, n=choices(raw), include_usage=wants_usage(raw))


def response(raw: Json, model: Model) -> Ask:
    model.check(raw.get("model", model.names[0]))
    given = required(raw, "input")
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if raw.get("instructions") and isinstance(turns, list):
        turns = [{"role": "system", "content": raw["instructions"]}, *turns]
    rendered = conversation(turns, raw.get("tools"), "input")
    return Ask(**sampling(raw, model, "max_output_tokens", [rendered]), tool=forced_tool(raw))


def message(raw: Json, model: Model) -> Ask:
    """An Anthropic message; `max_tokens` is required there."""
    model.check(raw.get("model", model.names[0]))
    required(raw, "max_tokens")
    return Ask(**sampling(raw, model, "max_tokens", [rendered_message(raw)]), tool=forced_tool(raw))


def rendered_message(raw: Json) -> bytes:
    turns = required(raw, "messages")
    if raw.get("system") and isinstance(turns, list):
        turns = [{"role": "system", "content": raw["system"]}, *turns]
    return conversation(turns, raw.get("tools"), "messages")


def detokenized(raw: Json) -> str:
    try:
        return prose.text_of(required(raw, "tokens"))
    except (OverflowError, TypeError, AttributeError) as exc:
        raise InvalidAsk(f"tokens are not of this vocabulary: {exc}", param="tokens") from exc
