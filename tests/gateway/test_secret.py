"""Secrets: resolved from references, refused in the clear, and shown by nothing."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import pickle
import pprint
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, ConfigError, changes, effective, parse
from gateway.secret import Secret

BASE = "pools: {p: {backends: [{url: http://a:1}], api_key: %s}}\nmodels: {m: {}}\n"
MARK = "hunter2"


def api_key(reference: str, **around: Any) -> Secret:
    """The API key of a configuration that refers to it."""
    key = parse(BASE % reference, **around).pools["p"].api_key
    assert key is not None
    return key


def test_references_are_resolved(tmp_path: Path) -> None:
    """env: by name; file: relative to the given folder or absolute, without its trailing line break."""
    (tmp_path / "key").write_text("from file\r\n")
    assert api_key("env:A_1", environ={"A_1": "from env"}).reveal() == "from env"
    assert api_key("file:key", folder=tmp_path).reveal() == "from file"
    assert api_key(f"file:{tmp_path}/key").reveal() == "from file"


def test_missing_references_are_named(tmp_path: Path) -> None:
    """Not set, empty, no file, a directory, a pipe, not readable as text, too large, several lines."""
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "big").write_bytes(b"x" * 70_000)
    (tmp_path / "lines").write_text("a\nb\n")
    os.mkfifo(tmp_path / "pipe")
    for reference, message in {
        "env:NONE": "the environment variable of env:NONE is not set",
        "env:EMPTY": "env:EMPTY is empty",
        "env:A-B": "env: takes the name of an environment variable, such as env:VLLM_API_KEY",
        "file:none": "file:none is not a file that can be read",
        "file:.": "file:. is not a file that can be read",
        "file:pipe": "file:pipe is not a file that can be read",
        "file:" + "x" * 300: '"file:' + "x" * 75 + '" is not a file that can be read',
        "'file:no such'": '"file:no such" is not a file that can be read',
        "file:empty": "file:empty is empty",
        "file:binary": "file:binary is not UTF-8 text",
        "file:big": "file:big is larger than 64 KiB: is it the right file?",
        "file:lines": "file:lines holds a line break or a control character: it must be one line of text",
    }.items():
        with pytest.raises(ConfigError) as caught:
            api_key(reference, folder=tmp_path, environ={"EMPTY": ""})
        assert str(caught.value) == f"headrace.yaml:1:44: pools.p.api_key: {message}"


LITERALS = [
    (
        "pools: {p: {backends: [{url: http://a:1}], api_key: hunter2}}",
        "pools.p.api_key: a secret is never written here",
    ),
    ("pools: {p: {backends: [{url: http://a:1}], api_key: [hunter2]}}", "pools.p.api_key: a secret is never written"),
    ("pools: {p: {backends: [{url: http://a:1}], api_key: *hunter2}}", "this alias has no anchor"),
    ("pools: {p: {backends: [{url: http://a:1}], api_key: !hunter2 x}}", "tags (!...) are not used here"),
    ("pools: {p: {backends: [{url: http://a:1}], api_key: 'env:hunter2!'}}", "env: takes the name of an environment"),
    ("pools: {p: {backends: [{url: 'http://hunter2:x@a:1'}]}}", "backends[0].url: a URL must not carry credentials"),
    ("pools: {p: {backends: [{url: 'http://a:hunter2'}]}}", "this is not a URL"),
    ("security: {secret: hunter2}", "security.secret: a secret is never written here"),
    ("server: {admin_token: hunter2}", "server.admin_token: a secret is never written here"),
    ("server: {tls: {cert: hunter2, key: hunter2}}", "server.tls.key: a PEM file is given as file:path"),
    ("server: {listen: 'me:hunter2@host:80'}", "server.listen: read a text of 18 characters"),
    ("state: {url: 'redis://:hunter2@host'}", "state.url: a URL with credentials is given by reference only"),
    ("state: {url: 'redis://host?password=hunter2'}", "state.url: a URL with credentials is given by reference only"),
    ("state: {url: 'hunter2'}", "state.url: memory, or a URL such as"),
    ("telemetry: {otlp: 'https://u:hunter2@host'}", "telemetry.otlp: a URL with credentials is given by reference"),
    ("tenants: {t: {keys: [{sha256: sk-hunter2-hunter2}]}}", "64 lower-case hexadecimal digits were expected"),
    ("tenants: {t: {limits: {concurrent: sk-hunter2-hunter2-hunter2-hunter2}}}", "read a text of 34 characters"),
]


@pytest.mark.parametrize(("text", "message"), LITERALS)
def test_a_literal_secret_is_refused_and_not_shown(text: str, message: str) -> None:
    """Neither in the report nor in anything that hangs on the error."""
    with pytest.raises(ConfigError) as caught:
        parse(text, environ={})
    assert message in str(caught.value)
    error: BaseException | None = caught.value
    assert MARK not in "".join(traceback.format_exception(caught.value))
    while error is not None:
        assert MARK not in repr(error) + str(error) + repr(vars(error))
        error = error.__context__


def test_a_referenced_url_is_checked_and_not_shown() -> None:
    """The scheme behind a reference is wrong: the reference is all that is said."""
    with pytest.raises(ConfigError) as caught:
        parse(BASE % "env:K" + "state: {url: env:U}", environ={"K": "k", "U": "http://:hunter2@host"})
    expected = "state.url: memory, or a URL such as redis://host:6379/0 (rediss:// for TLS), was expected"
    assert str(caught.value) == f"headrace.yaml:3:9: {expected}"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A configuration that holds a secret in every place that takes one."""
    (tmp_path / "admin").write_text("hunter2-admin\n")
    text = (
        BASE % "env:KEY"
        + "server: {admin_token: file:admin}\nsecurity: {secret: env:SALT}\n"
        + "state: {url: env:REDIS}\ntelemetry: {otlp: env:OTLP}\n"
    )
    urls = {"REDIS": "rediss://u:hunter2@host/0", "OTLP": "https://u:hunter2@host"}
    return parse(text, folder=tmp_path, environ={"KEY": "hunter2-key", "SALT": "hunter2-salt", **urls})


def _log(config: Config) -> str:
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    logger.error("%s %r %s", config, config, config.pools["p"].api_key)
    return stream.getvalue()


def _traceback(config: Config) -> str:
    key = config.pools["p"].api_key
    try:
        raise RuntimeError(config, key)
    except RuntimeError as exc:
        return "".join(traceback.TracebackException.from_exception(exc, capture_locals=True).format())


RENDERINGS: dict[str, Callable[[Config], str]] = {
    "repr": repr,
    "str": str,
    "format": lambda config: f"{config} {config.pools['p'].api_key} {config.pools['p'].api_key!r:>40}",
    "pprint": pprint.pformat,
    "json": lambda config: config.model_dump_json(),
    "dump": lambda config: str(config.model_dump()),
    "json of a dump": lambda config: json.dumps(config.model_dump(), default=str),
    "dict": lambda config: str(dict(config)) + str(vars(config.security)),
    "copy": lambda config: repr(copy.deepcopy(config)) + repr(config.model_copy(deep=True)),
    "effective": effective,
    "log": _log,
    "traceback with locals": _traceback,
}


@pytest.mark.parametrize("name", RENDERINGS)
def test_no_rendering_shows_a_secret(config: Config, name: str) -> None:
    """What is shown instead is the reference."""
    text = RENDERINGS[name](config)
    assert MARK not in text
    assert "env:KEY" in text or "env:SALT" in text


def test_a_secret_can_be_neither_pickled_nor_dumped(config: Config) -> None:
    """Refused rather than written down."""
    for dump in (pickle.dumps, json.dumps, yaml.safe_dump):
        with pytest.raises(Exception) as caught:
            dump(config.security.secret)
        assert MARK not in str(caught.value)
    with pytest.raises(TypeError, match="a secret cannot be pickled: file:admin"):
        pickle.dumps(config)


def test_a_changed_value_is_noticed_and_not_shown(config: Config) -> None:
    """Rotation behind the same reference is a change."""
    other = parse(BASE % "env:KEY", environ={"KEY": "hunter2-new"})
    same_place = changes(parse(BASE % "env:KEY", environ={"KEY": "hunter2-old"}), other)
    assert same_place == ["~ pools.p.api_key: another value behind env:KEY"]
    assert MARK not in "".join(changes(config, other))


def test_secrets_compare_by_value_and_reference() -> None:
    """Equal only if both are the same; never equal to a text."""
    assert Secret("a", "env:A") == Secret("a", "env:A")
    assert hash(Secret("a", "env:A")) == hash(Secret("b", "env:A"))
    assert Secret("a", "env:A") != Secret("b", "env:A")
    assert Secret("a", "env:A") != Secret("a", "env:B")
    assert Secret("a", "env:A") != "a"


@pytest.mark.parametrize("token", ["hunter2-pässword", "hunter2 ", " hunter2"])
def test_an_admin_token_that_no_header_can_carry_is_refused(token: str) -> None:
    """It would open nothing, to nobody."""
    with pytest.raises(ConfigError) as caught:
        parse(BASE % "env:K" + "server: {admin_token: env:T}", environ={"K": "k", "T": token})
    assert "server.admin_token: no header can carry it" in str(caught.value)
    assert MARK not in str(caught.value)


def test_a_file_that_is_gone_when_it_is_opened_is_a_problem_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there a moment ago, or is readable by its mode only: file servers have rules of their own."""
    monkeypatch.setattr("gateway.secret._readable", lambda path: True)
    with pytest.raises(ConfigError) as caught:
        parse(BASE % "file:gone", folder=tmp_path)
    assert "api_key: file:gone is not a file that can be read" in str(caught.value)
