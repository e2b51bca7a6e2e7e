"""Forms: the parts are found where they stand, and what two readers could read in two ways is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.multipart import MAX_PARTS, BadForm, Part, boundary, parts

MARK = b"----WebKitFormBoundary7MA4YWxk"


def form(*fields: tuple[bytes, bytes], mark: bytes = MARK, end: bytes = b"--\r\n") -> bytes:
    """A form; each field is the parameters behind `form-data`, and its content."""
    body = b""
    for parameters, content in fields:
        body += b"--%b\r\nContent-Disposition: form-data%b\r\n\r\n%b\r\n" % (mark, parameters, content)
    return body + b"--" + mark + end


def read(body: bytes, mark: bytes = MARK) -> list[tuple[str, bytes]]:
    return [(part.name, body[part.start : part.end]) for part in parts(body, mark)]


NAMES = st.text("abcdefghijklmnopqrstuvwxyz_[]0123456789äöü日", min_size=1, max_size=8)
CONTENTS = st.binary(max_size=60) | st.sampled_from([b"", b"\r\n", b"--", b"\r\n--", b"\r\n\r\n", b"--" + MARK[:-1]])
FIELDS = st.lists(st.tuples(NAMES, CONTENTS), max_size=6)


def written(fields: list[tuple[str, bytes]]) -> bytes:
    return form(*((b'; name="%b"' % name.encode(), content) for name, content in fields))


@given(FIELDS)
def test_every_part_is_found(fields: list[tuple[str, bytes]]) -> None:
    """Names and contents come out as they went in, whatever bytes a content has."""
    assert read(written(fields)) == fields


@given(FIELDS)
def test_a_part_and_the_next_leave_nothing_between_them(fields: list[tuple[str, bytes]]) -> None:
    """Cutting a part out from `first` to `last` leaves the form of the others."""
    body = written(fields)
    for number, part in enumerate(parts(body, MARK)):
        rest = body[: part.first] + body[part.last :]
        assert read(rest) == fields[:number] + fields[number + 1 :]


@given(FIELDS, st.data())
@settings(max_examples=200)
def test_a_form_cut_anywhere_is_refused(fields: list[tuple[str, bytes]], data: st.DataObject) -> None:
    """Every proper beginning of a form, down to nothing, is BadForm; only what follows the end may be missing."""
    body = written(fields)
    cut = data.draw(st.integers(0, len(body) - 3))
    with pytest.raises(BadForm):
        parts(body[:cut], MARK)
    assert read(body[:-2]) == read(body + b"epilogue") == fields


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=4))
@example(b"--b\r\n\r\n\r\n\r\n--b--", b"b")
@example(b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n--b--", b"b")
def test_any_bytes_are_a_form_or_refused(body: bytes, mark: bytes) -> None:
    """Never another exception; the offsets lie in the body and in order."""
    try:
        found = parts(body, mark)
    except BadForm:
        return
    position = 0
    for part in found:
        assert position <= part.first <= part.start <= part.end
        assert part.first < part.last <= len(body)
        position = part.last


@given(st.lists(st.sampled_from([b"--b", b"\r\n", b"--", b"Content-Disposition:", b" form-data", b'; name="x"', b"a"])))
@settings(max_examples=300)
def test_pieces_of_forms_in_any_order_are_a_form_or_refused(pieces: list[bytes]) -> None:
    """As above, with bytes that look like a form."""
    with suppress(BadForm):
        assert all(isinstance(part, Part) for part in parts(b"".join(pieces), b"b"))


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        (b'; name="model"', "model"),
        (b"; name=model", "model"),
        (b';name="model";filename="a.wav"', "model"),
        (b'; filename="a.wav"; name="model"', "model"),
        (b'; filename="; name=\\"model\\""; name="x"', "x"),
        (b'; filename="a; name=model; b"; name="x"', "x"),
        (b'; NAME="model"', "model"),
        (b'; name="mod\\el"', "model"),
        (b"; name=x; filename*=utf-8''%e4.wav", "x"),
        (b'; name="";', ""),
    ],
)
def test_the_name_of_a_part(parameters: bytes, name: str) -> None:
    """Quoted or not, in any order and case; what only looks like a name inside another value is none."""
    assert [found for found, _ in read(form((parameters, b"1")))] == [name]


@pytest.mark.parametrize(
    "parameters",
    [
        b"",
        b'; filename="x"',
        b'; name="x"; name="model"',
        b'; name="x"; Name="model"',
        b"; name*=utf-8''model",
        b'; name*0="mo"; name*1="del"',
        b'; name="x"; name*=model',
        b'; name="x',
        b'; name="x"y',
        b'; name="x" "y"',
        b'; name="x"\r\nContent-Disposition: form-data; name="model"',
        b'; name="x"\nContent-Disposition: form-data; name="model"',
        b'; name="x"\r\nX-A: 1\nContent-Disposition: form-data; name="model"',
        b'; name="x"\r\n ; y=z',
        b';\r\n name="x"',
        b'; name="x"\rX-A: 1',
    ],
)
def test_a_name_that_could_be_read_in_two_ways_is_refused(parameters: bytes) -> None:
    """No name, two names, encoded names, folded and half-ended lines."""
    with pytest.raises(BadForm):
        parts(form((parameters, b"1")), MARK)


@pytest.mark.parametrize("before", [b'{"model":"other"}\r\n', b"x\r\n", b"--%b\n\r\n" % MARK, b"\r\n\r\n", b" "])
def test_nothing_may_stand_before_a_form(before: bytes) -> None:
    """Ollama takes the JSON there for the request, whatever the content type. A line end there is some clients'."""
    body = form((b'; name="model"', b"m"))
    assert read(b"\r\n" + body) == read(body) == [("model", b"m")]
    with pytest.raises(BadForm):
        parts(before + body, MARK)


def test_a_flood_of_parts_is_refused_as_such() -> None:
    """As many parts as are allowed pass; one more says `flood`."""
    many = [(b'; name="x"', b"")] * MAX_PARTS
    assert len(parts(form(*many), MARK)) == MAX_PARTS
    with pytest.raises(BadForm) as refused:
        parts(form(*many, many[0]), MARK)
    assert refused.value.flood


def test_a_wrong_boundary_is_refused() -> None:
    """The content type names one, the form uses another."""
    with pytest.raises(BadForm, match="boundary"):
        parts(form((b'; name="x"', b"1")), b"another")


@pytest.mark.parametrize(
    ("content_type", "mark"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data;Boundary="a b:c"; charset=utf-8', b"a b:c"),
        (b'multipart/form-data; x="; boundary=y"; boundary=z', b"z"),
        (b"multipart/form-data ; boundary=" + b"a" * 200, b"a" * 200),
    ],
)
def test_the_boundary(content_type: bytes, mark: bytes) -> None:
    """Quoted or not, in any case, and not what stands in another parameter."""
    assert boundary(content_type) == mark


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 201,
        b"multipart/mixed; boundary=a",
        b"application/json; boundary=a",
        b'multipart/form-data; boundary="a',
        b"",
    ],
)
def test_no_one_boundary(content_type: bytes) -> None:
    """None, an empty one, two, one too long, another type."""
    with pytest.raises(BadForm):
        boundary(content_type)


@given(st.binary(max_size=80))
def test_any_content_type_has_a_boundary_or_is_refused(content_type: bytes) -> None:
    """Never another exception."""
    with suppress(BadForm):
        assert boundary(b"multipart/form-data" + content_type)
