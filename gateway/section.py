"""What every section of the configuration is made of: frozen, strict, each key with a default and a meaning."""

from __future__ import annotations

import hashlib
import re
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from gateway.units import Count


def option(default: Any, meaning: str, **bounds: Any) -> Any:
    """A key of the file: its default (`...` if there is none), its line in the documentation, its bounds."""
    return Field(default, description=meaning, **bounds)


def _key_hash(text: str) -> str:
    if text == hashlib.sha256(b"").hexdigest():
        raise ValueError("this is the hash of no key at all: was the variable empty?")
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return text
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("a hash is written in lower case")
    expected = f"64 lower-case hexadecimal digits were expected, this has {len(text)} characters"
    if re.fullmatch(r"[0-9a-fA-F.]*", text):
        raise ValueError(expected)
    raise ValueError(f"{expected} and looks like the key itself: give its hash (printf %s KEY | sha256sum)")


def if_empty(empty: object) -> BeforeValidator:
    """Reads a key with nothing behind it as `empty`."""
    return BeforeValidator(lambda value: empty if value == "" else value)


Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Names = Annotated[tuple[Name, ...], if_empty(())]
HttpPath = Annotated[str, StringConstraints(pattern=r"^/[!-~]*$")]
Port = Annotated[Count, Field(ge=1, le=65535)]
KeyHash = Annotated[str, AfterValidator(_key_hash)]


class Section(BaseModel):
    """A mapping of the file. An empty one (`limits:` and nothing below) is the same as none."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: Any) -> Any:
        return {} if data == "" else data


def below(kind: Any, part: str | int) -> Any:
    """The type of what stands at a key or index of a type; None where there is nothing of the kind."""
    if isinstance(kind, type) and issubclass(kind, Section):
        field = kind.model_fields.get(str(part))
        kind = field and field.annotation
    else:
        kind = next((arg for arg in reversed(get_args(kind)) if arg is not Ellipsis), None)
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = get_args(kind)[0]  # `X | None` is written in this order throughout
    return kind
