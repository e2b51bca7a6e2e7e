"""The way to a Redis or Valkey server, or to a cluster of them: short deadlines, a breaker for each node, and nothing
that was sent once is ever sent again.

Calls never connect: a node that is down fails them at once, and `watch` brings it back beside the requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from gateway.resp import Lane, LaneClosed, ReplyError
from gateway.stores import StoreAway

CALL_S = 0.05  # from a call to its reply
CONNECT_S = 1.0  # to connect, greet and ask for the slots, beside the requests
STRIKES = 3  # calls in a row without a reply in time that close a node: one may be bad luck
CROWD = 1000  # commands under way on one connection; more are no sooner answered for being sent
SLOTS = 16384
HOPS = 3  # from node to node, while slots move

SILENCES = 8  # probes in a row without any reply, after which another connection is tried
REDIRECTION = re.compile(r"(?:MOVED|ASK) \d+ (.*):(\d+)")  # `MOVED 3999 127.0.0.1:6381`

Address = tuple[str, int]
Word = str | bytes | int
Command = Sequence[Word]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads. `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS, in whose query
    `ssl_ca_certs=/path.pem` may name who signed the server's certificate."""

    address: Address
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: str) -> Target:
        """Raises ValueError, OSError for a certificate that cannot be read."""
        parts = urlsplit(url)
        tls = None
        if parts.scheme == "rediss":
            tls = ssl.create_default_context(cafile=parse_qs(parts.query).get("ssl_ca_certs", [None])[0])
        database = int(parts.path.strip("/") or 0)
        address = (parts.hostname or "localhost", parts.port or 6379)
        return cls(address, unquote(parts.username or ""), unquote(parts.password or ""), database, tls)


class Node:
    """One server. It is `up` while it is connected, answers in time, and carries out the `probe`."""

    def __init__(self, address: Address, target: Target, probe: Command) -> None:
        self.address = address
        self._answers = False
        self._target = target
        self._probe = probe
        self._lane: Lane | None = None
        self._strikes = 0
        self._silent = 0

    def __repr__(self) -> str:
        return f"<Node {self.address[0]}:{self.address[1]} {'up' if self.up else 'down'} {self._lane!r}>"

    @property
    def up(self) -> bool:
        return self._answers and self._lane is not None and not self._lane.closed

    async def call(self, *command: Word, asking: bool = False) -> Any:
        """The reply. Raises StoreAway where there is none in time; then the command may have been carried out all the
        same. Raises ReplyError where it was refused. `asking`: of a node that only begins to have the key's slot."""
        if not self.up or self._lane is None or self._lane.under_way >= CROWD:
            raise StoreAway("down")
        if asking:
            self._lane.send(["ASKING"]).cancel()  # it is for the next command only: nobody else's may come between
        try:
            reply = await in_time(self._lane.send(command))
        except TimeoutError:
            self._strikes += 1
            self._answers = self._strikes < STRIKES
            raise StoreAway("slow") from None
        except LaneClosed:
            raise StoreAway("closed") from None
        self._strikes = 0
        return reply

    async def revive(self) -> str:
        """Connect if need be, and see whether it carries out the probe in time; why not, if it does not."""
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._lane is None or self._lane.closed:
                    self._lane = await self._connect()
                    self._silent = 0
            await self._try(self._lane)
        except TimeoutError:
            return "it does not answer in time"
        except (OSError, UnicodeError) as error:  # UnicodeError: no name that could be looked up
            return str(error)
        except LaneClosed:
            return "it closes the connection"
        except ReplyError as error:
            self.close()  # who is in its place may be asked by its name
            return str(error)
        self._answers, self._strikes = True, 0
        return ""

    async def _try(self, lane: Lane) -> None:
        replies = lane.replies
        try:
            await in_time(lane.send(self._probe))
        except TimeoutError:
            self._silent = self._silent + 1 if lane.replies == replies else 0
            if self._silent >= SILENCES:
                lane.close()
            raise
        except ReplyError as error:
            if error.word != "MOVED":  # it would, if the key were its own
                raise

    def close(self) -> None:
        self._answers = False
        if self._lane is not None:
            self._lane.close()

    async def _connect(self) -> Lane:
        told, loop = self._target, asyncio.get_running_loop()
        host, port = self.address
        name = host if told.tls else None
        _, lane = await loop.create_connection(Lane, host, port, ssl=told.tls, server_hostname=name)
        try:
            if told.password:
                await lane.send(["AUTH", *([told.user] if told.user else []), told.password])
            if told.database:
                await lane.send(["SELECT", told.database])
        except ReplyError as error:  # who does not know a command repeats what it was given
            lane.close()
            raise ReplyError(str(error).replace(told.password, "***") if told.password else str(error)) from None
        except BaseException:
            lane.close()
            raise
        return lane


class Link:
    """All nodes. A server that is no cluster is one node with all slots."""

    def __init__(self, target: Target, script: str, probe: Command) -> None:
        """`probe` is what the script gets to see whether it runs at all: the number of keys, keys and arguments."""
        self._target = target
        self._probe: Command = ["EVAL", script, *probe]
        self._script = script
        self._digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._seed = Node(target.address, target, self._probe)
        self._nodes: dict[Address, Node] = {target.address: self._seed}
        self._slots: list[Node] = []  # empty: no cluster
        self._stale = True  # the slots have to be asked for
        self.calls = {"ok": 0, "slow": 0, "closed": 0, "down": 0, "refused": 0}
        self.why = "it was not asked yet"

    def __repr__(self) -> str:
        return f"<Link {list(self._nodes.values())}>"

    @property
    def up(self) -> bool:
        """Whether every node is."""
        return all(node.up for node in self._nodes.values())

    def reaches(self, key: str) -> bool:
        """Whether the node of a key is up."""
        return self._node(key).up

    async def run(self, keys: Sequence[str], arguments: Sequence[str | int]) -> list[int]:
        """The script's reply for keys of one slot. Raises StoreAway; then it may have run all the same. The fourth of
        the arguments is the number of requests that are decided."""
        node, ask = self._node(keys[0]), False
        command: list[Word] = ["EVALSHA", self._digest, len(keys), *keys, *arguments]
        for _ in range(HOPS):
            try:
                reply = await node.call(*command, asking=ask)
            except StoreAway as away:
                self.calls[str(away)] += 1
                self._stale = True
                raise
            except ReplyError as error:  # it was not carried out, and may be sent elsewhere or otherwise
                if error.word == "NOSCRIPT":
                    command[:2] = ["EVAL", self._script]  # which also loads it
                elif (there := self._moved(error)) is not None:
                    node, ask = there, error.word == "ASK"
                else:
                    if error.word != "TRYAGAIN":  # a slot on the move has some of the keys: the others' are all there
                        node.close()
                    break
            else:
                if (numbers := _numbers(reply, 3 * len(keys) + int(arguments[3]))) is None:
                    node.close()  # it is not what it seemed to be
                    break
                self.calls["ok"] += 1
                return numbers
        self.calls["refused"] += 1
        raise StoreAway("refused")

    async def watch(self) -> None:
        """Bring back what is down, and learn again who has which slots. To be called now and then."""
        reasons = await self._revive()
        self.why = next((reason for reason in reasons if reason), "")
        if self._stale or reasons:
            await self._learn()

    async def _revive(self) -> list[str]:
        return await asyncio.gather(*(node.revive() for node in self._nodes.values() if not node.up))

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()

    def _node(self, key: str) -> Node:
        return self._slots[slot(key)] if self._slots else self._seed

    def _moved(self, error: ReplyError) -> Node | None:
        """The node that a redirection names; None: it is none."""
        found = REDIRECTION.fullmatch(str(error))
        if found is None:
            return None
        self._stale = True
        return self._known((found[1] or self._target.address[0], int(found[2])))

    def _known(self, address: Address) -> Node:
        return self._nodes.setdefault(address, Node(address, self._target, self._probe))

    async def _learn(self) -> None:
        """Ask a node that is up who has which slots, and forget the nodes that have none."""
        for node in [node for node in self._nodes.values() if node.up]:
            try:
                ranges = await node.call("CLUSTER", "SLOTS")
            except StoreAway:
                continue
            except ReplyError:  # no cluster, or not allowed to ask: redirections will tell
                ranges = []
            self._spread(ranges)
            await self._revive()
            self._stale = False
            return

    def _spread(self, ranges: Sequence[Any]) -> None:
        if not ranges:
            return
        slots = self._slots or [self._seed] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # without a name, or with an empty one: at the address that it was asked at
            node = self._known(((host or b"").decode() or self._target.address[0], port))
            slots[first : last + 1] = [node] * (last + 1 - first)
        self._slots = slots
        used = {id(node) for node in slots}
        for node in [node for node in self._nodes.values() if id(node) not in used]:
            node.close()
            del self._nodes[node.address]


def _numbers(reply: Any, count: int) -> list[int] | None:
    """The script's reply, if it is as many numbers."""
    whole = isinstance(reply, list) and len(reply) == count and all(isinstance(each, int) for each in reply)
    return reply if whole else None


async def in_time(reply: asyncio.Future[Any]) -> Any:
    """The reply, if it comes within CALL_S. Raises TimeoutError, and what the reply raises."""
    try:
        await asyncio.wait((reply,), timeout=CALL_S)
        if not reply.done():
            await asyncio.sleep(0)  # what came while this loop itself was busy is read first
        if not reply.done():
            raise TimeoutError
        return reply.result()
    finally:
        reply.cancel()


def slot(key: str) -> int:
    """The slot of a key in a cluster: by its hash tag, where it has one that is not empty."""
    start = key.find("{")
    end = key.find("}", start + 2) if start >= 0 else -1
    return crc_hqx((key[start + 1 : end] if end > 0 else key).encode(), 0) % SLOTS
