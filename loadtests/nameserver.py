"""A name server of one's own, which says what it is told to, or nothing: DNS over UDP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class Mood(StrEnum):
    """How it takes questions."""

    ANSWERS = "answers"
    SILENT = "silent"
    FAILS = "fails"  # SERVFAIL, as a resolver whose own upstream is away


class NameServer(asyncio.DatagramProtocol):
    """Answers from `zone`: by name and type, a TTL in seconds and the records as text. Other names do not exist."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.mood = Mood.ANSWERS
        self.asked = 0
        self.address = ""  # and port

    def __repr__(self) -> str:
        return f"<NameServer {self.address} {self.mood} [{len(self.zone)} records, asked {self.asked} times]>"

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport
        self.address = "{}:{}".format(*transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked += 1
        if self.mood is not Mood.SILENT:
            self.transport.sendto(self.answer(dns.message.from_wire(data)).to_wire(), addr)

    def answer(self, question: dns.message.Message) -> dns.message.Message:
        """What it says to that."""
        reply = dns.message.make_response(question)
        if self.mood is Mood.FAILS:
            reply.set_rcode(dns.rcode.SERVFAIL)
            return reply
        name, kind = question.question[0].name, dns.rdatatype.to_text(question.question[0].rdtype)
        shown = name.to_text().rstrip(".")
        if not any(known == shown for known, _ in self.zone):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        ttl_s, records = self.zone.get((shown, kind), (0, []))
        if records:
            reply.answer.append(dns.rrset.from_text(name, ttl_s, "IN", kind, *records))
        return reply


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """One on a free port of this machine, until the block ends."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
