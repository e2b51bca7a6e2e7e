"""The reader of responses, with h11 as an independent judge: the same meaning however the bytes are cut."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http1 import MAX_HEAD, BadResponse, Header, ResponseReader, nominated, request_head

STEADY = settings(derandomize=True, deadline=None)

# -- what one reader makes of some bytes -----------------------------------------------------------------------------


@dataclass
class Reading:
    """One response as it was understood. `complete` is False where it broke off, `bad` where it was no HTTP."""

    status: int = 0
    headers: list[Header] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    reusable: bool = False
    bad: bool = False


def ours(pieces: Iterable[bytes], *, head_only: bool = False, closed: bool = True) -> Reading:
    """`closed`: the peer closes after the last piece."""
    reader = ResponseReader(head_only=head_only)
    reading = Reading()
    try:
        for piece in pieces:
            reading.body += reader.feed(piece)
    except BadResponse:
        reading.bad = True
    reading.reusable = reader.reusable and not closed
    if closed and not reading.bad:
        reader.eof()
    reading.status, reading.headers, reading.complete = reader.status, reader.headers, reader.complete
    return reading


def theirs(data: bytes, *, head_only: bool = False, closed: bool = True) -> Reading:
    """h11's. What follows the response is left alone, but makes the connection unfit for another one."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**26)
    parser.send(h11.Request(method="HEAD" if head_only else "GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    reading = Reading()
    try:
        parser.receive_data(data)
        if closed:
            parser.receive_data(b"")
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                reading.status, reading.headers = event.status_code, [*event.headers]
            elif isinstance(event, h11.Data):
                reading.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                reading.complete = True
                reading.reusable = parser.their_state is h11.DONE and not parser.trailing_data[0] and not closed
            elif isinstance(event, h11.ConnectionClosed):
                break
    except h11.RemoteProtocolError:
        reading.bad = not reading.complete
    return reading


# -- responses -------------------------------------------------------------------------------------------------------

TOKEN = st.text("abcxyzABC0189-_", min_size=1, max_size=12).map(str.encode)
VALUE = st.text("ab/;=, \t\"'()\x80\xff", max_size=20).map(lambda text: text.strip(" \t").encode("latin-1"))
KNOWN = (b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"content-encoding", b"upgrade")
FIELDS = st.lists(st.tuples(TOKEN.filter(lambda name: name.lower() not in KNOWN), VALUE), max_size=6)
BODY = st.lists(st.binary(min_size=1, max_size=80), max_size=6)
SPACE = st.sampled_from([b"", b" ", b"  "])  # no tab: llhttp takes "chunked<TAB>" for another coding


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    """A valid response to GET, with framing of every kind."""
    interim = draw(st.lists(st.sampled_from([100, 102, 103]), max_size=2))
    out = b"".join(b"HTTP/1.1 %d Wait\r\nlink: x\r\ncontent-length: 9\r\n\r\n" % status for status in interim)
    status = draw(st.sampled_from([200, 201, 203, 204, 304, 400, 404, 429, 500, 503]))
    pieces = [] if status in (204, 304) else draw(BODY)
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    lines = draw(FIELDS)
    if framing == "length":
        lines.append((b"Content-Length", b"%d" % sum(map(len, pieces))))
    elif framing == "chunked" and status not in (204, 304):
        lines.append((draw(st.sampled_from([b"Transfer-Encoding", b"transfer-encoding"])), b"chunked"))
    if draw(st.booleans()):
        lines.append((b"Connection", draw(st.sampled_from([b"close", b"keep-alive", b"Close", b"x-a, close"]))))
    lines = draw(st.permutations(lines))
    out += b"HTTP/1.1 %d %b\r\n" % (status, draw(st.sampled_from([b"OK", b"", b"Not \xe9"])))
    out += b"".join(b"%b:%b%b%b\r\n" % (name, draw(SPACE), value, draw(SPACE)) for name, value in lines) + b"\r\n"
    if framing != "chunked" or status in (204, 304):
        return out + b"".join(pieces)
    extension = draw(st.sampled_from([b"", b";x=1", b';q="a;b"']))
    out += b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    trailers = draw(st.lists(st.tuples(TOKEN, VALUE), max_size=2))
    return out + b"0\r\n" + b"".join(b"%b: %b\r\n" % each for each in trailers) + b"\r\n"


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    marks = [0, *sorted({place % (len(data) + 1) for place in places} - {0, len(data)}), len(data)]
    return [data[start:end] for start, end in pairwise(marks)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@STEADY
@given(responses(), CUTS, st.booleans())
def test_reads_what_h11_reads(data: bytes, places: list[int], closed: bool) -> None:
    """Status, headers, body, whether it is whole, and whether the connection may be used again."""
    assert ours(cut(data, places), closed=closed) == theirs(data, closed=closed)


@STEADY
@given(responses(), CUTS, st.integers(0, 10_000))
def test_what_breaks_off_is_never_taken_for_whole(data: bytes, places: list[int], end: int) -> None:
    """Any prefix, then the peer closes: complete exactly where h11 says so, and the same bytes of the body."""
    data = data[: end % (len(data) + 1)]
    mine, judge = ours(cut(data, places)), theirs(data)
    assert mine.complete == judge.complete
    assert mine.body == judge.body
    assert not mine.bad


@STEADY
@given(responses(), CUTS)
def test_a_response_to_head_has_no_body(data: bytes, places: list[int]) -> None:
    """Whatever its headers announce; bytes that come nevertheless cost the connection."""
    head = data[: data.rindex(b"\r\n\r\n", 0, data.find(b"HTTP/1.1 2") + 10_000) + 4]
    mine, judge = ours(cut(head, places), head_only=True), theirs(head, head_only=True)
    assert (mine.status, mine.body) == (judge.status, b"")


@STEADY
@given(responses(), responses(), CUTS)
def test_nothing_of_a_second_response_gets_into_the_first(data: bytes, more: bytes, places: list[int]) -> None:
    """A backend that says more than it was asked: the first response stands, and the connection is not used again."""
    alone = theirs(data, closed=False)
    mine = ours(cut(data + more, places), closed=False)
    if alone.complete:
        assert (mine.status, mine.headers, mine.body, mine.complete) == (
            alone.status,
            alone.headers,
            alone.body,
            True,
        )
        assert not mine.reusable


@STEADY
@given(responses(), st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=3)), min_size=1, max_size=3), CUTS)
def test_damaged_bytes_are_refused_or_read_as_h11_reads_them(
    data: bytes, damages: list[tuple[int, bytes]], places: list[int]
) -> None:
    """Nothing but BadResponse is raised, and what both take for a whole response is the same one."""
    for place, replacement in damages:
        place %= len(data) + 1
        data = data[:place] + replacement + data[place + 1 :]
    mine, judge = ours(cut(data, places)), theirs(data)
    if mine.complete and judge.complete:
        assert (mine.status, mine.body) == (judge.status, judge.body)


RESPONSES = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: \xe9\r\n\r\nhello",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n4\r\n you\r\n0\r\n\r\n",
    "trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-T: 1\r\nStatus: 500\r\n\r\n",
    "close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
    "interim": b"HTTP/1.1 103 E\r\nLink: a\r\n\r\nHTTP/1.1 100 C\r\n\r\nHTTP/1.1 201 X\r\nContent-Length: 1\r\n\r\n.",
    "no content": b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\nETag: x\r\n\r\n",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", RESPONSES)
def test_any_cut_gives_the_same(name: str) -> None:
    """In two at every offset, and byte by byte."""
    data = RESPONSES[name]
    judge = theirs(data)
    assert judge.complete
    for place in range(1, len(data)):
        assert ours([data[:place], data[place:]]) == judge
    assert ours(data[place : place + 1] for place in range(len(data))) == judge


def test_trailers_are_dropped() -> None:
    """They came after the headers had been relayed: neither a header nor the status can change any more."""
    reading = ours([RESPONSES["trailers"]])
    assert (reading.status, reading.headers) == (200, [(b"transfer-encoding", b"chunked")])


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    """Framing that two readers may take differently, another protocol, TLS."""
    assert ours([data], closed=False).bad


def fed(data: bytes, size: int = 4096) -> int:
    """How much of it is read until it is refused."""
    reader = ResponseReader()
    for start in range(0, len(data), size):
        try:
            reader.feed(data[start : start + size])
        except BadResponse:
            return start
    return len(data)


@pytest.mark.parametrize(
    "endless",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"1" * 1_000_000,
        b"HTTP/1.1 103 Early\r\n\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n.\r\n0\r\n" + b"X: 1\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"x" * 1_000_000,
    ],
)
def test_heads_and_trailers_are_bounded(endless: bytes) -> None:
    """Neither headers, one header, interim responses, trailers nor a chunk extension may go on for ever."""
    assert MAX_HEAD - 4096 <= fed(endless) <= MAX_HEAD + 4096


def test_a_head_within_the_bound_is_read() -> None:
    """One header of 60 KiB."""
    assert ours([b"HTTP/1.1 200 OK\r\nX: ", b"1" * 60_000, b"\r\nContent-Length: 0\r\n\r\n"]).complete


def test_a_long_stream_in_tiny_segments_is_no_flood() -> None:
    """Chunk sizes that arrive by themselves are no trailers, however many there are."""
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(MAX_HEAD // 4):
        assert [reader.feed(piece) for piece in (b"2\r", b"\n", b"hi", b"\r\n")] == [b"", b"", b"hi", b""]


def test_what_came_before_the_damage_is_not_lost() -> None:
    """Two good chunks and a bad one in one segment: the good ones are handed out with the error."""
    reader = ResponseReader()
    with pytest.raises(BadResponse) as refused:
        reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\nzz\r\n")
    assert refused.value.body == b"ab"


# -- compressed bodies -----------------------------------------------------------------------------------------------


def packed(data: bytes, encoding: str, flush_every: int = 10**9) -> bytes:
    squeeze = zlib.compressobj(wbits={"gzip": 31, "deflate": 15, "raw": -15}[encoding])
    out = b""
    for start in range(0, len(data), flush_every):
        out += squeeze.compress(data[start : start + flush_every]) + squeeze.flush(zlib.Z_SYNC_FLUSH)
    return out + squeeze.flush()


def answer(body: bytes, encoding: str) -> bytes:
    name = b"gzip" if encoding == "gzip" else b"deflate"
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nETag: x\r\nContent-Length: %d\r\n\r\n%b" % (
        name,
        len(body),
        body,
    )


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw"])
@STEADY
@given(data=st.binary(max_size=300), every=st.integers(1, 100), places=CUTS)
def test_compressed_bodies_come_out_plain(encoding: str, data: bytes, every: int, places: list[int]) -> None:
    """However they are cut; `deflate` with and without its zlib wrapper, as both are in use."""
    reading = ours(cut(answer(packed(data, encoding, every), encoding), places))
    assert (reading.body, reading.complete, reading.bad, reading.headers) == (data, True, False, [])


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw"])
def test_a_compressed_body_comes_out_as_it_comes_in(encoding: str) -> None:
    """Each flushed piece at once."""
    squeeze = zlib.compressobj(wbits={"gzip": 31, "deflate": 15, "raw": -15}[encoding])
    reader = ResponseReader()
    name = b"gzip" if encoding == "gzip" else b"deflate"
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\n\r\n" % name)
    for number in range(5):
        piece = b"event %d" % number
        assert reader.feed(squeeze.compress(piece) + squeeze.flush(zlib.Z_SYNC_FLUSH)) == piece


def test_gzip_of_several_members_comes_out_whole() -> None:
    """As RFC 1952 allows; some proxies compress piece by piece."""
    body = packed(b"one ", "gzip") + packed(b"two ", "gzip") + packed(b"three", "gzip")
    data = answer(body, "gzip")
    for place in range(1, len(data)):
        assert ours([data[:place], data[place:]]).body == b"one two three"


@pytest.mark.parametrize("body", [b"", b"{", b'{"a":1}', b"x", b"\x1f", b"data: hi\n\n"])
def test_what_only_claims_to_be_compressed_passes(body: bytes) -> None:
    """Cut anywhere, too."""
    data = answer(body, "gzip")
    for place in range(1, len(data)):
        reading = ours([data[:place], data[place:]])
        assert (reading.body, reading.complete) == (body, True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_that_is_damaged_or_cut_is_not_whole(encoding: str) -> None:
    """Though the HTTP around it is: what would be passed on is less than what was meant."""
    good = packed(b"hello " * 100, encoding)
    for place in range(2, len(good)):
        damaged = good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :]
        for body in (good[:place], damaged):
            reading = ours([answer(body, encoding)])
            assert reading.bad or reading.body == b"hello " * 100
            assert not (reading.bad and (reading.complete or reading.reusable))
    assert ours([answer(good[:-1], encoding)]).bad


def test_a_bomb_is_refused() -> None:
    """Bytes that grow a thousandfold cost bounded memory; text that shrinks well passes."""
    assert ours(cut(answer(packed(b"\0" * 50_000_000, "gzip"), "gzip"), range(0, 10**6, 65536))).bad
    many = packed(b"\0" * 5_000, "gzip") * 20_000
    assert ours([answer(many, "gzip")]).bad
    text = b"".join(b'{"token":%d,"logprob":-0.125},' % (number % 7) for number in range(500_000))
    assert ours(cut(answer(packed(text, "gzip"), "gzip"), range(0, 10**6, 262_144))).body == text


# -- requests --------------------------------------------------------------------------------------------------------


@STEADY
@given(st.lists(st.tuples(TOKEN, VALUE), max_size=5), st.binary(max_size=20))
def test_h11_reads_the_requests_that_are_written(headers: list[Header], body: bytes) -> None:
    """Method, target, host, headers in order, and the body."""
    headers = [(name, value) for name, value in headers if name.lower() not in (*KNOWN, b"host")]
    server = h11.Connection(h11.SERVER)
    server.receive_data(request_head(b"POST", b"/v1/x?y=%20", b"engine:8000", headers, len(body)) + body)
    request = server.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (b"POST", b"/v1/x?y=%20")
    named = [(name.lower(), value) for name, value in headers]
    assert [*request.headers] == [(b"host", b"engine:8000"), *named, (b"content-length", b"%d" % len(body))]
    if body:
        event = server.next_event()
        assert isinstance(event, h11.Data)
        assert bytes(event.data) == body
    assert isinstance(server.next_event(), h11.EndOfMessage)


def test_connection_nominates_headers() -> None:
    """Any number of them, in any case, in several fields."""
    headers = [(b"connection", b"close, X-A ,"), (b"x", b"y"), (b"connection", b"x-b")]
    assert nominated(headers) == {b"close", b"x-a", b"", b"x-b"}
