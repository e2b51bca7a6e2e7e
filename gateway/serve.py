"""One gateway process: two listeners on one event loop, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from gateway.admin import Admin
from gateway.app import Gateway
from gateway.config import Config
from gateway.connection import Connection, HeadLimits
from gateway.descriptors import connections
from gateway.exchange import Endpoint
from gateway.logs import LogWriter, as_text
from gateway.reload import Reloader
from gateway.rest import api
from gateway.wire import ENDPOINTS

BACKLOG = 4096
CUT_S = 1.0  # how long answers that were cut short may take to tell their clients so


class Server(uvicorn.Server):
    """uvicorn's server, stopped by its owner and not by signals of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError with the address in its message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


async def serve(
    settings: Config, path: Path | None = None, *, ready: Callable[[str, str], None] = lambda api, admin: None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends it at once. `ready` gets both URLs. `path` is
    where the settings were read, and will be read again."""
    server = settings.server
    room = connections(server.max_connections, promised="max_connections" in server.model_fields_set)
    listeners = [listen(server.listen.host, server.listen.port), listen(server.admin.host, server.admin.port)]
    log = LogWriter(sys.stderr.fileno())
    writers: dict[str, Callable[[bytes], None]]
    writers = {"json": log.write, "text": lambda line: log.write(as_text(line)), "off": _discard}
    async with Gateway(settings, writers[settings.telemetry.log], log.metrics) as gateway:
        reloader = Reloader(path, gateway, time.time)
        admin = Admin(gateway, reloader)
        servers = [
            Server(_configuration(api(gateway), settings, _protocol(gateway, ENDPOINTS, room), tls=True)),
            Server(_configuration(admin.application(), settings, _protocol(gateway, {}, room))),
        ]
        reloader.on_change.append(partial(_renew_certificate, servers[0].config))
        tasks = [asyncio.create_task(each.serve([sock])) for each, sock in zip(servers, listeners, strict=True)]
        with _signals(reloader.call) as stopped:
            scheme = "https" if server.tls else "http"
            ready(f"{scheme}://{_shown(listeners[0])}", f"http://{_shown(listeners[1])}")
            async with reloader, admin.board:
                await _first(stopped[0].wait(), *tasks)
            await _drain(gateway, stopped[1])
        admin.feed.close()
        for each in servers:
            each.should_exit = True
        await asyncio.gather(*tasks)
    log.flush()


async def _drain(gateway: Gateway, hurry: asyncio.Event) -> None:
    told = gateway.settings.server
    gateway.leave()
    if told.linger:
        await _first(hurry.wait(), timeout_s=told.linger)
    gateway.stop_queueing()
    await _first(gateway.wait_idle(), hurry.wait(), timeout_s=told.drain)
    gateway.stop_running()
    await _first(gateway.wait_idle(), timeout_s=CUT_S)


async def _first(*awaitables: Any, timeout_s: float | None = None) -> None:
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
def _signals(reload: Callable[[], None]) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Two events: set by the first and by the second SIGTERM or SIGINT. SIGHUP calls `reload`."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield first, second
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _protocol(gateway: Gateway, endpoints: Mapping[str, Endpoint], room: int) -> Any:
    targets = {endpoint.target: endpoint for endpoint in endpoints.values()}

    def connection(*args: Any, **kwargs: Any) -> Connection:
        told = gateway.settings.server
        limits = HeadLimits(told.max_header_bytes, told.header_timeout, min(told.max_connections, room))
        return Connection(*args, **kwargs, limits=limits, endpoints=targets, infer=gateway.infer)

    return connection


def _configuration(application: Any, settings: Config, protocol: Any, *, tls: bool = False) -> uvicorn.Config:
    told = settings.server
    return uvicorn.Config(
        application,
        http=protocol,
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


def _shown(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _discard(line: bytes) -> None:
    """For a gateway that logs nothing."""
