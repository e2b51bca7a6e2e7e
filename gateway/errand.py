"""The gateway's own questions to a backend: one GET after another on one connection, which is kept."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gateway.backend import Backend, Timeouts
from gateway.errors import Unanswered, UpstreamFailed
from gateway.http1 import Answer, request_head
from gateway.link import Link
from gateway.reply import Clock, Reply

MOST = 8 * 2**20  # bytes of an answer; vLLM's metrics are some 100 KB
AGENT = (b"user-agent", b"headrace-probe")
PATIENT = Timeouts(1e9, 1e9, 1e9, 1e9, 1e9)  # the errand's own clock is the only one


class ErrandFailed(Exception):
    """No answer that can be read. `gone`: nobody listens there, or who did has dropped the connection; `silent`:
    nothing came in time."""

    def __init__(self, message: str, *, gone: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.gone = gone
        self.silent = silent


class Errands:
    """To one backend. All questions are asked by one task."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self.backend = backend
        self._clock = clock
        self._link: Link | None = None

    def __repr__(self) -> str:
        return f"<Errands to {self.backend.name}, {self._link!r}>"

    async def get(self, path: str, limit_s: float) -> Answer:
        """What the backend says at a path below its base URL. Raises ErrandFailed."""
        try:
            async with asyncio.timeout(limit_s):
                if self._link is not None and not self._link.closed:
                    with suppress(Unanswered):  # closed while it was idle, which tells nothing
                        return await self._ask(self._link, path)
                return await self._ask(await self._connect(), path)
        except TimeoutError:
            raise ErrandFailed(f"no answer within {limit_s:g} s", silent=True) from None
        except OSError as error:  # of a machine that cannot be reached nobody knows what it does
            gone = isinstance(error, ConnectionError)
            raise ErrandFailed(error.strerror or type(error).__name__, gone=gone, silent=not gone) from error
        except UpstreamFailed as error:
            raise ErrandFailed(error.message, gone=isinstance(error, Unanswered)) from error

    def close(self) -> None:
        """Let the connection go."""
        if self._link is not None:
            self._link.abort()

    async def _connect(self) -> Link:
        backend = self.backend
        link = Link()
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: link,
                backend.host,
                backend.port,
                ssl=backend.tls,
                server_hostname=backend.host if backend.tls else None,
            )
        except BaseException:
            link.abort()
            raise
        self._link = link
        return link

    async def _ask(self, link: Link, path: str) -> Answer:
        backend = self.backend
        headers = [AGENT, (b"accept-encoding", b"identity")]
        if backend.authorization is not None:
            headers.append((b"authorization", backend.authorization))
        reply = Reply(link, PATIENT, stream=False, clock=self._clock)
        try:
            link.send(request_head(b"GET", backend.prefix + path.encode(), backend.host_header, headers, 0), [])
            await reply.wait_head()
            pieces: list[bytes] = []
            size = 0
            while data := await reply.read():
                size += len(data)
                if size > MOST:
                    raise ErrandFailed(f"an answer of more than {MOST} bytes")
                pieces.append(data)
        except BaseException:
            link.abort()
            raise
        if not reply.reader.reusable:
            link.abort()
        else:
            link.rest(self._clock(), reply.reader.keep_alive_hint)
        return Answer(reply.status, reply.headers, b"".join(pieces))
