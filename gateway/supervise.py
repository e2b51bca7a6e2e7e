"""Several workers on one machine, and the process that looks after them: it owns the admin port, reads the file, and is
the one that is told to end."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.address import Address
from gateway.config import Config
from gateway.crewadmin import CrewAdmin
from gateway.logs import LogWriter
from gateway.orders import Orders
from gateway.reload import Reloader
from gateway.serve import CUT_S, Server, bind, configuration, first, listen, protocol, shown, signals
from gateway.workers import Crew

LOOK_S = 1.0  # what a worker counted since is lost when it dies
VIEWERS = 256  # connections to the admin port
END_S = 5.0  # for workers that were told to end at once


async def supervise(
    settings: Config, path: Path, workers: int, *, ready: Callable[[str, str], None] = lambda api, admin: None
) -> int:
    """Serve with so many workers until SIGTERM or SIGINT, then let them drain; a second signal ends them at once.
    Returns the exit code. Raises OSError where an address is taken."""
    server = settings.server
    log = LogWriter(sys.stderr.fileno())
    with TemporaryDirectory(prefix="headrace-") as folder, _held(server.listen) as api:
        admin_socket = listen(server.admin.host, server.admin.port)
        orders = Orders(settings, path, Address(server.listen.host, api.getsockname()[1]), workers)
        reloader = Reloader(path, orders, time.time)
        async with Crew(workers, Path(folder), orders, log, time.monotonic) as crew:
            admin = CrewAdmin(crew, orders, reloader, time.monotonic)
            spreading: set[asyncio.Task[None]] = set()

            def taken(settings: Config) -> None:
                orders.take(settings)
                spreading.add(task := asyncio.create_task(crew.spread()))
                task.add_done_callback(spreading.discard)

            reloader.on_change.append(taken)
            with signals(reloader.call) as (told, hurry):
                serving = Server(_configuration(admin, orders))
                tasks = [asyncio.create_task(serving.serve([admin_socket])), asyncio.create_task(_look(admin))]
                begun = asyncio.ensure_future(crew.wait_complete())
                await first(begun, told.wait(), *tasks)
                code = begun.result() if begun.done() else None
                if begun.done() and code is None:
                    ready(f"{'https' if server.tls else 'http'}://{shown(api)}", f"http://{shown(admin_socket)}")
                    async with reloader:
                        await first(told.wait(), *tasks)
                begun.cancel()
                await _end(crew, hurry)
            admin.feed.close()
            serving.should_exit = True
            tasks[1].cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
    log.flush()
    return code or 0


async def _end(crew: Crew, hurry: asyncio.Event) -> None:
    crew.end()
    ended = asyncio.ensure_future(crew.wait_ended())
    await first(ended, hurry.wait())
    if not ended.done():
        crew.end()
        await first(ended, timeout_s=CUT_S + END_S)
    ended.cancel()


async def _look(admin: CrewAdmin) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        await admin.look()


@contextmanager
def _held(address: Address) -> Iterator[socket.socket]:
    """The API's address, for the workers to share; nobody connects to it here. Nobody else may be there: another
    gateway of the same user could share it, too, and would get some of the requests."""
    bind(address.host, address.port).close()
    with bind(address.host, address.port, shared=True) as sock:
        yield sock


def _configuration(admin: CrewAdmin, orders: Orders) -> Any:
    settings = orders.generation.settings
    inner = protocol(lambda: orders.generation.settings, {}, VIEWERS, _nothing)
    return configuration(admin.application(), settings, inner)


async def _nothing(_: object) -> None:
    """No inference comes to the admin port."""
