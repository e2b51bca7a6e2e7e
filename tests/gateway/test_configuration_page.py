"""The user's page of the configuration is true. `python -m tests.gateway.test_configuration_page` renews its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import trustme
import yaml
from pydantic import TypeAdapter

from gateway import address, config, schema, secret, section, units
from gateway.section import Section, below

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARK = "## Every key\n"
TYPES: list[tuple[Any, str]] = [
    (units.Seconds, "duration"),
    (units.Bytes, "size"),
    (units.Count, "count"),
    (units.Share, "share"),
    (units.Number, "number"),
    (units.Flag, "true, false"),
    (units.Instant, "time"),
    (secret.SecretText, "secret"),
    (secret.StoreUrl, "URL or secret"),
    (secret.CollectorUrl, "URL or secret"),
    (secret.PemFile, "file:path"),
    (address.Listener, "host:port"),
    (address.BackendUrl, "URL"),
    (address.DnsName, "name:port"),
    (address.NameServer, "address:port"),
    (section.Name, "name"),
    (section.Names, "list of names"),
    (section.Port, "port"),
    (section.KeyHash, "hash"),
    (section.HttpPath, "path"),
    (str, "name"),
]


def type_name(hint: Any) -> str:
    """What the column "type" says of a type of the schema."""
    for known, name in TYPES:
        if hint == known:
            return name
    if get_origin(hint) in (Literal,):
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if hint is schema.Engine:
        return ", ".join(f"`{engine}`" for engine in schema.Engine)
    if get_origin(hint) is UnionType or type(None) in get_args(hint):
        return type_name(get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, Section):
        return "section"
    if hasattr(hint, "__metadata__"):
        return type_name(get_args(hint)[0])
    assert get_origin(hint) is not None, hint
    inner = type_name(hint.__args__[-1] if hint.__args__[-1] is not Ellipsis else hint.__args__[0])
    return f"list of {inner}s" if get_origin(hint) is tuple else f"{inner}s by name"


def default_text(hint: Any, field: Any) -> str:
    """What the column "default" says."""
    if field.is_required():
        return "required"
    if isinstance(field.default, Section) or field.default in (None, (), {}, ""):
        return ""
    shown: str = TypeAdapter(hint).dump_json(field.default).decode()
    return f"`{shown.strip('[]').replace(',', ', ').replace(chr(34), '')}`"


def sections(kind: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Every section of the file, with its path."""
    yield path, kind
    for name, field in kind.model_fields.items():
        inside, where = below(kind, name), f"{path}.{name}".lstrip(".")
        if get_origin(inside) is not None and not isinstance(inside, type) and get_origin(inside) is not Literal:
            where += "[]" if get_origin(inside) is tuple else ".NAME"
            inside = below(inside, 0)
        if isinstance(inside, type) and issubclass(inside, Section):
            yield from sections(inside, where)
        assert field.description, where


def tables() -> str:
    """The generated part of the page."""
    text = MARK
    for path, kind in sections(schema.Config, ""):
        hints = get_type_hints(kind, include_extras=True)
        summary = re.sub(r"\s+", " ", (kind.__doc__ or "").strip())
        text += f"\n### `{path}`\n" if path else ""
        text += f"\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, field in kind.model_fields.items():
            row = (f"`{name}`", type_name(hints[name]), default_text(hints[name], field), field.description)
            text += f"| {' | '.join(map(str, row))} |\n"
    return text


def example(path: Path) -> str:
    """The complete example of the page; the files that it refers to are made in `path`."""
    certificate = trustme.CA().issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(path / "tls.crt")
    certificate.private_key_pem.write_to_path(path / "tls.key")
    return re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


ENVIRON = {
    "HEADRACE_ADMIN_TOKEN": "admin-value",
    "HEADRACE_SECRET": "secret-value",
    "VLLM_API_KEY": "vllm-value",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector-value:4318",
}


def test_tables_of_the_page_are_those_of_the_schema() -> None:
    """No key, type, default or meaning is missing or stale; the fix is one command."""
    page = PAGE.read_text()
    assert page[page.index(MARK) :] == tables(), "run: python -m tests.gateway.test_configuration_page"


def test_examples_of_the_page_are_valid(tmp_path: Path) -> None:
    """Both examples can be served as they stand."""
    short, whole = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert config.parse(short, environ={}).models["llama-3-8b"].pool == "llama"
    assert config.parse(example(tmp_path), folder=tmp_path, environ=ENVIRON).tenants["acme"].weight == 2
    assert whole


def test_complete_example_holds_every_key(tmp_path: Path) -> None:
    """What can be set is shown once."""
    shown: set[tuple[type[Section], str]] = set()

    def visit(kind: Any, data: Any) -> None:
        for part, value in (
            data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        ):
            if isinstance(kind, type) and issubclass(kind, Section):
                shown.add((kind, str(part)))
            visit(below(kind, part), value)

    visit(schema.Config, yaml.safe_load(example(tmp_path)))
    everything = {(kind, name) for _, kind in sections(schema.Config, "") for name in kind.model_fields}
    known_elsewhere = {(schema.Limits, name) for name in schema.Limits.model_fields}
    assert everything - shown - known_elsewhere == set()


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.partition(MARK)[0] + tables())
