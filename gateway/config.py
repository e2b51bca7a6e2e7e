"""The configuration: a YAML file, or a few backends, as one frozen `Config`; or else every problem at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gateway.consistency import Finding, inconsistencies
from gateway.problem import ConfigError, Loc, Problem, dotted, suggestion
from gateway.schema import ANY_MODEL, Backend, Config, Key, Server
from gateway.secret import Surroundings
from gateway.section import Section, below
from gateway.units import quoted
from gateway.yamlfile import compose, read_text

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "admin_port",
    "changes",
    "effective",
    "load",
    "open_pool",
    "parse",
    "restated",
]

_A_MAPPING = "keys were expected here (key: value), not {read}"
_WORDS = {  # for pydantic's types of errors
    "model_type": _A_MAPPING,
    "mapping_type": _A_MAPPING,
    "dict_type": _A_MAPPING,
    "tuple_type": "a list was expected, such as [a, b], not {read}",
    "string_type": "a text was expected, not {read}",
    "string_too_short": "has no value: give it one or remove it",
    "string_pattern_mismatch": "a path begins with / and holds no blanks, such as /health",
    "too_short": "must hold at least one item",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
_NAMED_SECTIONS = ("pools", "models", "classes", "tenants")


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration in a file; relative `file:` references start at its folder. ConfigError if it cannot serve."""
    return parse(read_text(path), str(path), folder=path.parent, environ=environ)


def parse(
    text: str, name: str = "headrace.yaml", *, folder: Path = Path(), environ: Mapping[str, str] = os.environ
) -> Config:
    """The configuration in a YAML text; `name` stands for the file in problems. ConfigError if it cannot serve."""
    root, problems = compose(text, name)
    config, findings = _read(root.plain(), Surroundings(folder, environ))
    problems += [Problem(name, message, loc, *root.position(loc)) for loc, message in findings]
    if config is None or problems:
        raise ConfigError(problems)
    return config


def admin_port(path: Path, environ: Mapping[str, str] = os.environ) -> Server:
    """Only `server.admin` and its token, as they stand in a file: who asks a running gateway seldom has all the secrets
    that it was started with, and the file may be bad elsewhere. ConfigError if these two cannot be read."""
    root, problems = compose(read_text(path), str(path))
    data = {name: value for name, value in root.plain().items() if name == "server"}
    if isinstance(data.get("server"), dict):
        data["server"] = {name: data["server"][name] for name in ("admin", "admin_token") if name in data["server"]}
    config, findings = _validated(data, Surroundings(path.parent, environ))
    problems += [Problem(str(path), message, loc, *root.position(loc)) for loc, message in findings]
    if config is None or problems:
        raise ConfigError(problems)
    return config.server


def open_pool(backends: Sequence[str], listen: str = "127.0.0.1:8080", admin: str = "127.0.0.1:9090") -> Config:
    """One pool without a file: any model name is forwarded, and everybody on this machine is the one tenant.

    ConfigError if an address is wrong or `listen` is not on loopback.
    """
    data = {
        "server": {"listen": listen, "admin": admin},
        "pools": {"default": {"backends": [{"url": url} for url in backends]}},
        "models": {ANY_MODEL: {}},
    }
    config, findings = _read(data, Surroundings(Path(), {}))
    flags: dict[Loc, str] = {("server", "listen"): "--listen", ("server", "admin"): "--admin"}
    if config is None or findings:
        raise ConfigError([Problem(flags.get(loc, "--backend"), message) for loc, message in findings])
    return config


def effective(config: Config) -> str:
    """The configuration as YAML with every default filled in and secrets as references; read back, it is the same."""
    data = config.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def restated(config: Config) -> str:
    """The configuration as YAML with only what was said in it: read back, it is the same, and what was left out is."""
    data = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _read(data: Any, around: Surroundings) -> tuple[Config | None, list[Finding]]:
    """The configuration in plain data, and all that is wrong with it.

    What cannot be read is taken out of `data`, so that the rest is checked in the same go.
    """
    config, findings = _validated(data, around)
    if findings:
        torn = {_torn(data, loc) for loc, _ in findings}
        for loc in sorted(torn, reverse=True):  # the last item of a list first: indexes stay true
            _take_out(data, loc)
        config, _ = _validated(data, around)
        return None, findings + (list(inconsistencies(config, torn)) if config else [])
    return config, list(inconsistencies(config)) if config else []


def _validated(data: Any, around: Surroundings) -> tuple[Config | None, list[Finding]]:
    try:
        return Config.model_validate(data, context=around), []
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
    # Outside of the handler: pydantic's error holds the input, and must not be the context of ours.
    return None, [_finding(error) for error in errors]


def _torn(data: Any, loc: Loc) -> Loc:
    """The part to do without: the item of a list, the mapping that lacks a key, or just the value."""
    for depth, part in enumerate(loc):
        if isinstance(data, list):
            return loc[: depth + 1]
        if not isinstance(data, dict) or part not in data:
            return loc[:depth]
        data = data[part]
    return loc


def _take_out(data: Any, loc: Loc) -> None:
    for part in loc[:-1]:
        data = data[part]
    if len(loc) == 2 and loc[0] in _NAMED_SECTIONS:
        data[loc[1]] = {}  # the name stays: others may refer to it
    else:
        del data[loc[-1]]


def _finding(error: Any) -> Finding:
    """One of pydantic's errors in our words."""
    loc: Loc = error["loc"]
    if error["type"].startswith("string_") and loc[-1] == "[key]":
        return loc[:-1], "a name has 1 to 256 characters"
    match error["type"]:
        case "value_error":
            return loc, str(error["ctx"]["error"])
        case "missing":
            return loc, f"is required: {_section(loc).model_fields[str(loc[-1])].description}"
        case "extra_forbidden":
            return loc, "unknown key" + suggestion(str(loc[-1]), _section(loc).model_fields, "known keys")
        case "literal_error" | "enum":
            known = re.findall(r"'(.*?)'", error["ctx"]["expected"])
            hint = suggestion(str(error["input"]), known, "it may be")
            return loc, f"read {quoted(error['input'])}, which is not known here{hint}"
    if words := _WORDS.get(error["type"]):
        return loc, words.format(read=quoted(error["input"]), **error.get("ctx", {}))
    return loc, str(error["msg"])


def _section(loc: Loc) -> Any:
    """The section that holds, or should hold, the last key of `loc`."""
    kind: Any = Config
    for part in loc[:-1]:
        kind = below(kind, part)
    return kind


def changes(old: Config, new: Config) -> list[str]:
    """What differs, a line each: `+ added`, `- removed`, `~ key: before -> after`. Secrets show as references."""
    lines = list(_differences((), old, new))
    if list(old.classes) != list(new.classes):  # equal mappings may differ in order, and here it is the urgency
        lines.append(f"~ classes: {_text(list(old.classes))} -> {_text(list(new.classes))}")
    return lines


def _differences(loc: Loc, old: Section, new: Section) -> Iterator[str]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for name in type(old).model_fields:
        was, now = getattr(old, name), getattr(new, name)
        here = (*loc, name)
        if was == now:
            continue
        if isinstance(was or now, Section):
            yield from _item_differences(loc, {name: was} if was else {}, {name: now} if now else {})
        elif (was_items := _items(was)) is not None and (now_items := _items(now)) is not None:
            yield from _item_differences(here, was_items, now_items)
        elif before[name] == after[name]:
            yield f"~ {dotted(here)}: another value behind {after[name]}"
        else:
            yield f"~ {dotted(here)}: {_text(before[name])} -> {_text(after[name])}"


def _items(value: object) -> Mapping[str, Section] | None:
    """Things with names, by name: backends by URL, keys by id or hash. None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and all(isinstance(item, Backend | Key) for item in value):
        return {item.url if isinstance(item, Backend) else item.id or item.sha256[:12]: item for item in value}
    return None


def _item_differences(loc: Loc, old: Mapping[str, Section], new: Mapping[str, Section]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield f"- {dotted((*loc, name))}"
        elif name not in old:
            yield f"+ {dotted((*loc, name))}"
        else:
            yield from _differences((*loc, name), old[name], new[name])


def _text(value: object) -> str:
    return "none" if value is None else f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
