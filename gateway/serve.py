"""One gateway process, alone or one of several: two listeners on one event loop, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import uvicorn

from gateway.admin import Admin, Change
from gateway.app import Gateway
from gateway.config import Config
from gateway.connection import Connection, HeadLimits, Infer
from gateway.descriptors import connections
from gateway.exchange import Endpoint
from gateway.logs import LogWriter, as_text
from gateway.reload import Reloader
from gateway.rest import api
from gateway.wire import ENDPOINTS

BACKLOG = 4096
SILENT_S, PROBE_S, PROBES = 30, 10, 3  # a client that is cut off holds what it has for a minute at most
CUT_S = 1.0  # how long answers that were cut short may take to tell their clients so


class Server(uvicorn.Server):
    """uvicorn's server, stopped by its owner and not by signals of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def wait_started(self) -> None:
        """Returns when it accepts connections."""
        while not self.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one worker among several. The API's port is all theirs; `admin` is where a private Unix socket will
    be, which asks for no token, and on which it is brought its configuration. `changes` were made to the backends
    before it came."""

    admin: Path
    changes: tuple[Change, ...] = ()


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens. Raises OSError with the address in its message. Peers that vanish without a word are
    noticed: connections that are accepted inherit the kernel's probes."""
    sock = bind(host, port, shared=shared)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.listen(BACKLOG)
    return sock


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that holds an address, and shares it with other processes that say so. Raises OSError with the address
    in its message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None
    sock.setblocking(False)
    return sock


async def serve(
    settings: Config,
    path: Path | None = None,
    *,
    seat: Seat | None = None,
    ready: Callable[[str, str], None] = lambda api, admin: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends it at once. `ready` gets both URLs. `path` is
    where the settings were read, and will be read again unless there is a `seat`."""
    server = settings.server
    room = connections(server.max_connections, promised="max_connections" in server.model_fields_set)
    listeners = [listen(server.listen.host, server.listen.port, shared=seat is not None)]
    if seat is None:
        listeners.append(listen(server.admin.host, server.admin.port))
    log = LogWriter(sys.stderr.fileno())
    writers: dict[str, Callable[[bytes], None]]
    writers = {"json": log.write, "text": lambda line: log.write(as_text(line)), "off": _discard}
    async with Gateway(settings, writers[settings.telemetry.log], log.metrics) as gateway:
        reloader = Reloader(path, gateway, time.time)
        admin = Admin(gateway, reloader)
        if seat is not None:
            admin.replay(seat.changes)
        servers = _servers(gateway, admin, room, seat)
        reloader.on_change.append(partial(_renew_certificate, servers[0].config))
        tasks = [
            asyncio.create_task(each.serve([sock] if sock is not None else None))
            for each, sock in zip_longest(servers, listeners)
        ]
        with signals(reloader.call) as (told, hurry):
            await first(asyncio.gather(*(each.wait_started() for each in servers)), *tasks)
            urls = [f"{'https' if server.tls else 'http'}://{shown(listeners[0])}", f"http://{shown(listeners[-1])}"]
            ready(*urls)
            async with reloader if seat is None else nullcontext(), admin.board:
                await first(told.wait(), *tasks)
            await _drain(gateway, hurry)
        admin.feed.close()
        for each in servers:
            each.should_exit = True
        await asyncio.gather(*tasks)
    log.flush()


def _servers(gateway: Gateway, admin: Admin, room: int, seat: Seat | None) -> list[Server]:
    """Of the API, and of the admin port or what a worker has in its place."""
    settings = gateway.settings
    inner = partial(protocol, lambda: gateway.settings, room=room, infer=gateway.infer)
    public = configuration(api(gateway), settings, inner(endpoints=ENDPOINTS), tls=True)
    if seat is None:
        return [Server(public), Server(configuration(admin.application(), settings, inner(endpoints={})))]
    return [Server(public), Server(configuration(admin.private(), settings, inner(endpoints={}), uds=seat.admin))]


async def _drain(gateway: Gateway, hurry: asyncio.Event) -> None:
    told = gateway.settings.server
    gateway.leave()
    if told.linger:
        await first(hurry.wait(), timeout_s=told.linger)
    gateway.stop_queueing()
    await first(gateway.wait_idle(), hurry.wait(), timeout_s=told.drain)
    gateway.stop_running()
    await first(gateway.wait_idle(), timeout_s=CUT_S)


async def first(*awaitables: Any, timeout_s: float | None = None) -> None:
    """Wait for the first of several things; the others are cancelled, unless they are tasks of somebody else."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for given, task in zip(awaitables, tasks, strict=True):
            if given is not task:
                task.cancel()


def _renew_certificate(serving: uvicorn.Config, settings: Config) -> None:
    """Who connects from now on sees the certificate that is in the files now."""
    if settings.server.tls is not None and serving.loaded and serving.ssl is not None:
        serving.ssl.load_cert_chain(settings.server.tls.cert, settings.server.tls.key)


@contextmanager
def signals(reload: Callable[[], None]) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Two events: set by the first and by the second SIGTERM or SIGINT. SIGHUP calls `reload`."""
    loop = asyncio.get_running_loop()
    told, hurry = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurry if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield told, hurry
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def protocol(now: Callable[[], Config], endpoints: Mapping[str, Endpoint], room: int, infer: Infer) -> Any:
    """Connections under the configuration that holds when they come, `room` of them at most."""
    targets = {endpoint.target: endpoint for endpoint in endpoints.values()}

    def connection(*args: Any, **kwargs: Any) -> Connection:
        told = now().server
        limits = HeadLimits(told.max_header_bytes, told.header_timeout, min(told.max_connections, room))
        return Connection(*args, **kwargs, limits=limits, endpoints=targets, infer=infer)

    return connection


def configuration(
    application: Any, settings: Config, protocol: Any, *, tls: bool = False, uds: Path | None = None
) -> uvicorn.Config:
    """For a server of `application`, on a socket that it is given or at `uds`."""
    told = settings.server
    return uvicorn.Config(
        application,
        http=protocol,
        uds=str(uds) if uds is not None else None,
        ws="none",
        loop="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(told.keep_alive),
        timeout_graceful_shutdown=round(CUT_S),
        ssl_certfile=told.tls.cert if told.tls and tls else None,
        ssl_keyfile=told.tls.key if told.tls and tls else None,
    )


def shown(sock: socket.socket) -> str:
    """Where it listens, as it stands in a URL."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _discard(line: bytes) -> None:
    """For a gateway that logs nothing."""
