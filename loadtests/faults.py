"""The ways in which an emulated backend can fail, one small function each, in one table.

A fault is told as NAME[:ARG][@RATE]: for a server (`--fault reset-after:5@0.1` hits one request in ten) or for one
request by the header `x-emulate-fault: NAME[:ARG]`. It is armed before the request is handled: it taps the pieces of
the reply, or answers by itself, in which case it returns True and the request is not handled at all.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random

from loadtests.dialects.shape import DONE, data, encoded
from loadtests.httpd import Piece, Reply, Request, swallow
from loadtests.taps import Paced, at, edited, endless, reframed, with_text

HEADER = b"x-emulate-fault"
SPEC = re.compile(r"(?P<name>[a-z0-9-]+)(:(?P<arg>-?\d+(\.\d+)?))?(@(?P<rate>1|0?\.\d+))?")
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ODD_TEXT = "é漢🌊".encode()
FILL_BYTES = 1 << 18
PLAIN = b"text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Fault:
    """`arm(reply, arg)` returns True if it has taken the request. `arg` is the default of its argument."""

    arm: Callable[[Reply, float], bool]
    arg: float
    help: str


@dataclass(frozen=True, slots=True)
class Told:
    """A fault as it was told: which, with what argument, how often (0 to 1)."""

    name: str
    arg: float
    rate: float = 1.0

    def strike(self, reply: Reply, rng: Random) -> bool:
        """Arm it, as often as its rate says. True if the request has been taken."""
        return (self.rate >= 1 or rng.random() < self.rate) and FAULTS[self.name].arm(reply, self.arg)


def parse(spec: str) -> Told:
    """Read NAME[:ARG][@RATE]. Raises ValueError that names what there is."""
    found = SPEC.fullmatch(spec.strip())
    if found is None or found["name"] not in FAULTS:
        names = ", ".join(FAULTS)
        raise ValueError(f"no fault {spec!r}: NAME[:ARG][@RATE] with RATE from 0 to 1, NAME one of {names}")
    fault = FAULTS[found["name"]]
    return Told(found["name"], float(found["arg"] or fault.arg), float(found["rate"] or 1))


def told(request: Request) -> Told | None:
    """The fault that the request asks for. Raises ValueError as `parse` does."""
    spec = request.headers.get(HEADER)
    return parse(spec.decode("latin-1")) if spec else None


# Before the head.


def reset(reply: Reply, arg: float) -> bool:
    reply.reset(after_s=arg)
    return True


def hang_up(reply: Reply, arg: float) -> bool:
    reply.close()
    return True


def stall(reply: Reply, arg: float) -> bool:
    reply.tap = swallow
    return False


def garbage(reply: Reply, arg: float) -> bool:
    reply.raw(b"\x16\x03\x01\x02 this is no HTTP\r\n\r\n")
    reply.close()
    return True


def status(code: int, kind: str) -> Callable[[Reply, float], bool]:
    """A refusal in vLLM's shape, with Retry-After in seconds (0: without)."""

    def arm(reply: Reply, arg: float) -> bool:
        error = {"message": f"{kind}: told to refuse.", "type": kind, "param": None, "code": code}
        reply.whole(code, encoded({"error": error}), headers=[(b"retry-after", b"%g" % arg)] if arg else [])
        return True

    return arm


def plain(reply: Reply, arg: float) -> bool:
    reply.whole(int(arg), b"upstream connect error or disconnect/reset before headers", PLAIN)
    return True


def endless_error(reply: Reply, arg: float) -> bool:
    reply.begin(500, PLAIN)
    endless(reply, b"%x\r\n%b\r\n" % (FILL_BYTES, b"x" * FILL_BYTES))
    return True


def endless_headers(reply: Reply, arg: float) -> bool:
    reply.raw(b"HTTP/1.1 200 OK\r\n")
    endless(reply, b"x-filler: %b\r\n" % (b"y" * 100) * (FILL_BYTES // 112))
    return True


# In the answer. `after` counts body pieces: the tokens of a stream.


def reset_after(reply: Reply, arg: float) -> bool:
    reply.tap = at(arg, lambda reply, _: reply.reset())
    return False


def stall_after(reply: Reply, arg: float) -> bool:
    reply.tap = at(arg, lambda reply, _: reply.abandon())
    return False


def cut_off(reply: Reply, arg: float) -> bool:
    """FIN between two pieces, without the terminator."""
    reply.tap = at(arg, lambda reply, _: reply.close())
    return False


def truncate(reply: Reply, arg: float) -> bool:
    """FIN inside a piece, one byte after its declared length."""

    def cut(reply: Reply, passing: bytes) -> None:
        if reply.chunked:
            reply.raw(b"%x\r\n%b" % (len(passing), passing[:1]))
        reply.close()

    reply.tap = at(arg, cut)
    return False


def error_frame(reply: Reply, arg: float) -> bool:
    """As vLLM does when its engine dies: an error event and an orderly end; a whole answer is a 500 instead."""

    def fail(reply: Reply, _: bytes) -> None:
        words = reply.error or (lambda message, kind, code: data({"error": message}) + DONE)
        reply.put(Piece.BODY, words(DEATH, "InternalServerError", 500))
        reply.put(Piece.END, b"")
        reply.abandon()

    armed = at(arg, fail)

    def tap(reply: Reply, piece: Piece, passing: bytes) -> None:
        if piece is Piece.HEAD and not reply.chunked:
            reply.tap = None
            status(500, "InternalServerError")(reply, 0)
            reply.tap = swallow
        else:
            armed(reply, piece, passing)

    reply.tap = tap
    return False


def with_odd_text(text: bytes) -> Callable[[Reply, float], bool]:
    """The first token says `text` besides."""

    def arm(reply: Reply, arg: float) -> bool:
        say = partial(with_text, text=text * max(1, int(arg)))
        reply.tap = lambda reply, piece, passing: reply.put(piece, edited(reply, piece, passing, say))
        return False

    return arm


def drip(reply: Reply, arg: float) -> bool:
    """Everything byte by byte, `arg` milliseconds apart."""
    reply.tap = Paced(arg / 1e3, lambda passing: (passing[i : i + 1] for i in range(len(passing))))
    return False


def split_utf8(reply: Reply, arg: float) -> bool:
    """Characters of two, three and four bytes in the first token, cut inside each of them."""

    def cut(passing: bytes) -> list[bytes]:
        start = passing.find(ODD_TEXT)
        ends = [0, start + 1, start + 4, start + 7, len(passing)] if start >= 0 else [0, len(passing)]
        return [passing[a:b] for a, b in pairwise(ends)]

    paced, say = Paced(arg / 1e3, cut), partial(with_text, text=ODD_TEXT)
    reply.tap = lambda reply, piece, passing: paced(reply, piece, edited(reply, piece, passing, say))
    return False


def slow(reply: Reply, arg: float) -> bool:
    """Every piece `arg` times as late as it would be."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    def tap(reply: Reply, piece: Piece, passing: bytes) -> None:
        reply.later((loop.time() - start) * (arg - 1), partial(reply.put, piece, passing))

    reply.tap = tap
    return False


# In the framing.


def wrong_length(reply: Reply, arg: float) -> bool:
    """A Content-Length that is `arg` off: with more than there is the connection is closed early."""

    def tap(reply: Reply, piece: Piece, passing: bytes) -> None:
        if piece is Piece.HEAD:
            declared = re.search(rb"content-length: (\d+)", passing)
            length = max(0, int(declared[1] if declared else 1000) + int(arg))
            passing = reframed(passing, b"content-length: %d" % length)
            reply.chunked = False
        if piece is Piece.END:
            reply.close()
        else:
            reply.put(piece, passing)

    reply.tap = tap
    return False


def gzip_body(reply: Reply, arg: float) -> bool:
    """A compressed body that nobody asked for."""
    deflate = zlib.compressobj(wbits=31)

    def tap(reply: Reply, piece: Piece, passing: bytes) -> None:
        if piece is Piece.HEAD:
            reply.chunked = True
            reply.put(piece, reframed(passing, b"transfer-encoding: chunked\r\ncontent-encoding: gzip"))
        elif piece is Piece.BODY:
            reply.put(piece, deflate.compress(passing) + deflate.flush(zlib.Z_SYNC_FLUSH))
        else:
            reply.put(Piece.BODY, deflate.flush())
            reply.put(piece, passing)

    reply.tap = tap
    return False


def keep_alive_drop(reply: Reply, arg: float) -> bool:
    """The kept connection is closed `arg` milliseconds after the answer, without a word about it."""

    def tap(reply: Reply, piece: Piece, passing: bytes) -> None:
        reply.put(piece, passing)
        if piece is Piece.END:
            reply.later(arg / 1e3, reply.close)

    reply.tap = tap
    return False


FAULTS = {
    "refuse": Fault(reset, 0, "connections are refused; asked for by a request: reset at once"),
    "reset": Fault(reset, 0, "RST before the head, ARG seconds after the request"),
    "hang-up": Fault(hang_up, 0, "FIN before the head"),
    "stall": Fault(stall, 0, "silence before the head"),
    "garbage": Fault(garbage, 0, "bytes that are no HTTP"),
    "429": Fault(status(429, "TooManyRequests"), 1, "refusal with Retry-After: ARG"),
    "503": Fault(status(503, "ServiceUnavailable"), 1, "refusal with Retry-After: ARG"),
    "plain": Fault(plain, 502, "status ARG with a plain text"),
    "endless-error": Fault(endless_error, 0, "a 500 whose body never ends"),
    "endless-headers": Fault(endless_headers, 0, "a head that never ends"),
    "reset-after-headers": Fault(reset_after, 0, "RST right after the head"),
    "reset-after": Fault(reset_after, 3, "RST after ARG tokens"),
    "stall-after-headers": Fault(stall_after, 0, "silence after the head"),
    "stall-after": Fault(stall_after, 3, "silence after ARG tokens"),
    "truncate": Fault(truncate, 3, "FIN inside the piece after ARG tokens"),
    "cut-off": Fault(cut_off, 3, "FIN after ARG tokens, without a terminator"),
    "engine-death": Fault(error_frame, 0, "200, and the first event is an error; not streamed: a 500"),
    "error-frame": Fault(error_frame, 3, "an error event after ARG tokens, then an orderly end"),
    "huge-event": Fault(with_odd_text(b"x"), 1 << 20, "the first token is ARG bytes long"),
    "bad-utf8": Fault(with_odd_text(b"\xff\xfe\xc3"), 1, "the first token is no UTF-8"),
    "split-utf8": Fault(split_utf8, 5, "characters cut between two writes, ARG ms apart"),
    "drip": Fault(drip, 1, "byte by byte, ARG ms apart"),
    "slow": Fault(slow, 10, "everything ARG times as late"),
    "wrong-length": Fault(wrong_length, 10, "Content-Length is ARG off"),
    "gzip": Fault(gzip_body, 0, "a compressed body that nobody asked for"),
    "keep-alive-drop": Fault(keep_alive_drop, 0, "FIN ARG ms after the answer, unannounced"),
}
