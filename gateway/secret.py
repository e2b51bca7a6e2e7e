"""Values that are never shown: given by reference (`env:NAME`, `file:path`) and revealed only on request."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import parse_qs, urlsplit

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from gateway.problem import shown

_REFERENCE = re.compile(r"(env|file):(.+)", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CREDENTIALS = re.compile(r"@|[?&;][^=&;]*(pass|token|secret|api_?key|auth|sig)[^=&;]*=", re.IGNORECASE)
MAX_SECRET_BYTES = 64 * 1024  # a certificate chain is smaller; a log file named by mistake is not

BY_REFERENCE = "a secret is never written here, only where it is found: env:NAME or file:path"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where references lead: the configuration's folder (for relative paths) and the environment."""

    folder: Path
    environ: Mapping[str, str]


class Secret:
    """A value and the reference it came from. Everything that prints it prints the reference."""

    __slots__ = ("__value", "reference")

    def __init__(self, value: str, reference: str) -> None:
        self.__value = value
        self.reference = reference

    def reveal(self) -> str:
        """The value itself: for the wire, never for a message."""
        return self.__value

    def __str__(self) -> str:
        return self.reference

    def __repr__(self) -> str:
        return f"<Secret {self.reference}>"

    def __eq__(self, other: object) -> bool:
        """Same reference and same value, compared in constant time."""
        if not isinstance(other, Secret):
            return NotImplemented
        same = hmac.compare_digest(self.__value.encode(), other.__value.encode())
        return same and self.reference == other.reference

    def __hash__(self) -> int:
        return hash(self.reference)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a secret cannot be pickled: {self.reference}")


def _follow(reference: str, info: ValidationInfo) -> str:
    """The value that a reference leads to; ValueError, with the reference and no value, if there is none."""
    found = _REFERENCE.fullmatch(reference)
    if not found:
        raise ValueError(BY_REFERENCE)
    if not isinstance(info.context, Surroundings):
        raise ValueError("references are resolved only by load() and parse()")
    kind, name = found.groups()
    value = _variable(name, info.context) if kind == "env" else _contents(info.context.folder / name, reference)
    if not value:
        raise ValueError(f"{shown(reference)} is empty")
    if not value.isprintable():
        raise ValueError(f"{shown(reference)} holds a line break or a control character: it must be one line of text")
    return value


def _variable(name: str, around: Surroundings) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError("env: takes the name of an environment variable, such as env:VLLM_API_KEY")
    if name not in around.environ:
        raise ValueError(f"the environment variable of env:{name} is not set")
    return around.environ[name]


def _contents(path: Path, reference: str) -> str:
    if not _readable(path):  # asked first: to open a pipe would wait for its writer
        raise ValueError(f"{shown(reference)} is not a file that can be read")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_SECRET_BYTES + 1)
    except OSError:  # it has gone since, or its file server knows better
        raise ValueError(f"{shown(reference)} is not a file that can be read") from None
    if len(raw) > MAX_SECRET_BYTES:
        raise ValueError(f"{shown(reference)} is larger than {MAX_SECRET_BYTES // 1024} KiB: is it the right file?")
    try:
        return raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError(f"{shown(reference)} is not UTF-8 text") from None


def _readable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):  # a name too long, a NUL in it
        return False


def _secret(value: object, info: ValidationInfo) -> Secret:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError(BY_REFERENCE)
    return Secret(_follow(value, info), value)


def _url(value: object, info: ValidationInfo, schemes: tuple[str, ...], expected: str) -> Secret:
    """A URL, literal if it carries no credentials, else by reference; no message shows any part of it."""
    if isinstance(value, Secret):
        return value
    text = str(value)
    if _REFERENCE.fullmatch(text):
        url = Secret(_follow(text, info), text)
    elif _CREDENTIALS.search(text):
        raise ValueError("a URL with credentials is given by reference only: env:NAME or file:path")
    else:
        url = Secret(text, text)
    try:
        parts = urlsplit(url.reveal())
        sound = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f"{expected} was expected")
    return url


def _store(value: object, info: ValidationInfo) -> Secret:
    if isinstance(value, Secret) or value == "memory":
        return value if isinstance(value, Secret) else Secret("memory", "memory")
    url = _url(value, info, ("redis", "rediss"), "memory, or a URL such as redis://host:6379/0 (rediss:// for TLS),")
    parts = urlsplit(url.reveal())
    if not re.fullmatch(r"/?[0-9]{0,5}/?", parts.path, re.ASCII):
        raise ValueError("the URL ends with the number of a database, such as redis://host:6379/0")
    if not all(_readable(Path(signers)) for signers in parse_qs(parts.query).get("ssl_ca_certs", ())):
        raise ValueError("ssl_ca_certs in the URL does not name a file that can be read")
    return url


def _collector(value: object, info: ValidationInfo) -> Secret:
    return _url(value, info, ("http", "https"), "a URL such as http://collector:4318")


def _pem(value: object, info: ValidationInfo) -> Path:
    """The path of a `file:` reference that can be read; the TLS library opens it itself."""
    if isinstance(value, Path):
        return value
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if not found or found[1] != "file" or not isinstance(info.context, Surroundings):
        raise ValueError("a PEM file is given as file:path, such as file:/etc/headrace/tls.crt")
    path = (info.context.folder / found[2]).absolute()
    if not _readable(path):
        raise ValueError(f"{shown(str(value))} is not a file that can be read")
    return path


_as_reference = PlainSerializer(str, return_type=str, when_used="json")

SecretText = Annotated[Secret, PlainValidator(_secret), _as_reference]
StoreUrl = Annotated[Secret, PlainValidator(_store), _as_reference]
CollectorUrl = Annotated[Secret, PlainValidator(_collector), _as_reference]
PemFile = Annotated[Path, PlainValidator(_pem), PlainSerializer(lambda path: f"file:{path}", when_used="json")]
