"""The envelope finds members where they stand, and splices touch nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.envelope import BadBody, read

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=6)
STYLES = st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 2}, {"ensure_ascii": False}])


def spliced(body: bytes, values: dict[str, bytes], removals: tuple[str, ...] = ()) -> bytes:
    return b"".join(read(body).splice(values, removals))


@given(OBJECTS, STYLES)
def test_members_stand_where_the_spans_say(value: dict[str, Any], style: dict[str, Any]) -> None:
    """Key and value literals, cut out by their offsets, decode to what was written."""
    body = json.dumps(value, **style).encode("utf-8", "surrogatepass")
    try:
        body.decode()
    except UnicodeDecodeError:
        with pytest.raises(BadBody):
            read(body)
        return
    spans = read(body).spans()
    assert list(spans) == list(json.loads(body)) or any(0xD800 <= ord(c) < 0xE000 for key in value for c in key)
    for span, (key, expected) in zip(spans.values(), json.loads(body).items(), strict=True):
        assert json.loads(body[span.value : span.end]) == expected
        assert json.loads(body[span.key : span.value].rstrip().removesuffix(b":")) == key


@settings(max_examples=200)
@given(OBJECTS, STYLES, st.data())
def test_a_splice_equals_the_edit_on_the_decoded_object(
    value: dict[str, Any], style: dict[str, Any], data: st.DataObject
) -> None:
    """Replacing, adding and removing members gives the JSON that editing the object gives."""
    value = {key: item for key, item in value.items() if key.isascii()}
    body = json.dumps(value, **style).encode("utf-8", "surrogatepass")
    keys = [*value, "new", "newer"]
    replaced = data.draw(st.dictionaries(st.sampled_from(keys), st.integers(), max_size=3))
    removed = data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=4))
    removed = [key for key in removed if key not in replaced]
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    result = json.loads(spliced(body, {key: b"%d" % item for key, item in replaced.items()}, tuple(removed)))
    expected = {key: item for key, item in (json.loads(body) | replaced).items() if key not in removed}
    assert result == expected


def test_the_bytes_around_a_splice_are_untouched() -> None:
    """White space, big integers, odd floats, escapes and order stay as sent."""
    body = b'{ "seed" :18446744073709551617,\n"model" : "a" , "x":[1.0, 1E5,1e400, "\\ud83d\\u0000"] , "priority": 3 }'
    assert spliced(body, {"model": b'"longer"'}) == body.replace(b'"a"', b'"longer"')
    assert spliced(body, {}, ("priority",)) == body.replace(b' , "priority": 3', b"")
    assert spliced(body, {}, ("model",)) == body.replace(b'"model" : "a" , ', b"")
    assert spliced(body, {"salt": b"1"}) == b'{"salt":1,' + body[1:]


@pytest.mark.parametrize(
    ("body", "values", "removals", "expected"),
    [
        (b"{}", {"a": b"1"}, (), b'{"a":1}'),
        (b'{"a":1}', {}, ("a",), b"{}"),
        (b'{"a":1,"b":2}', {"c": b"3"}, ("a", "b"), b'{"c":3}'),
        (b'{"a":1,"b":2,"c":3}', {}, ("b", "c"), b'{"a":1}'),
        (b'{"a":1,"b":2,"c":3}', {"b": b"9"}, ("a", "c"), b'{"b":9}'),
    ],
)
def test_splices_at_the_edges(
    body: bytes, values: dict[str, bytes], removals: tuple[str, ...], expected: bytes
) -> None:
    """First, last, only and neighbouring members keep the commas right."""
    assert spliced(body, values, removals) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{ "model":"a", "x":1, "model":"b" }',
        b'{"x":1,"model":"a","mod\\u0065l":"a"}',
        b'{"a":1,"b":{"c":1},"a":{"c":1}}',
        b'{"a" :1,"a":12 }',
    ],
)
def test_a_key_given_twice_is_refused(body: bytes) -> None:
    """Engines take the last of two equal keys, other readers the first: such a body has no one meaning."""
    with pytest.raises(BadBody, match="twice"):
        read(body)


NOT_OBJECTS = [b"", b"{", b"[]", b'"x"', b"null", b'{"a":1}x', b'\xef\xbb\xbf{"a":1}', b'{"a":NaN}', b'{"a":"\xff"}']
NOT_OBJECTS += ['{"a":1}'.encode("utf-16"), b"[" * 100_000, b'{"a":' + b"[" * 100_000, b'{"a":01}', b'{"a":"\x01"}']


@pytest.mark.parametrize("body", [*NOT_OBJECTS, b'{"a":"\\ud8"}'], ids=lambda body: repr(body[:16]))
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    """Each with a message; never another exception."""
    with pytest.raises(BadBody):
        read(body)


def test_lone_surrogates_pass() -> None:
    """An escaped half of a pair is legal JSON and is forwarded as sent."""
    body = b'{"model":"m","messages":[{"content":"\\ud83d and \\\\ud83d and \\uDE00"}]}'
    assert bytes(read(body).members["model"]) == b'"m"'
    assert spliced(body, {"model": b'"n"'}) == body.replace(b'"m"', b'"n"')
