"""The worker processes of one gateway: told the same, kept alive, heard, and ended together."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from gateway.logs import LogWriter
from gateway.metrics import Counter, Family, Gauge
from gateway.orders import Orders
from gateway.reply import Clock
from gateway.summed import Sum, unpacked

ASK_S = 5.0  # for an answer of a worker, on a machine that does something else
TAKE_S = 30.0  # for a configuration: a large one is read for seconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0  # before a worker is started again, twice as long each time
STEADY_S = 10.0  # who lived so long did not die of its start

logger = logging.getLogger("headrace")


class Worker:
    """One process. `name` is another one for each that had this seat; `holds` is the version of its orders."""

    def __init__(self, seat: int, admin: Path, process: Process, holds: int) -> None:
        self.seat = seat
        self.process = process
        self.holds = holds
        self.name = f"{seat}/{process.pid}"
        self.hearing = asyncio.Lock()  # what was asked later is heard later
        transport = httpx.AsyncHTTPTransport(uds=str(admin))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=ASK_S)

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.process.returncode}>"

    async def ask(self, method: str, path: str, **told: Any) -> httpx.Response | None:
        """On its private socket. None where it does not answer."""
        if self.client.is_closed:  # it ended since it was looked up
            return None
        try:
            return await self.client.request(method, path, **told)
        except httpx.HTTPError:
            return None

    def signal(self, number: int) -> None:
        """Which it may be too late for."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Crew:
    """`async with Crew(...)` keeps `count` workers until it ends; `up` are those that serve, by seat. `failed` becomes
    an exit code if one of the first ones cannot begin."""

    def __init__(self, count: int, folder: Path, orders: Orders, log: LogWriter, clock: Clock) -> None:
        self.count = count
        self.up: dict[int, Worker] = {}
        self.sum = Sum()
        self.restarts = 0
        self._folder = folder
        self._orders = orders
        self._log = log
        self._clock = clock
        self._running: dict[int, Worker] = {}
        self._complete = asyncio.Event()
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._spreading = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Crew {len(self.up)} of {self.count} up, {self.restarts} restarts>"

    async def __aenter__(self) -> Crew:
        self._tasks = [asyncio.create_task(self._keep(seat)) for seat in range(self.count)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_complete(self) -> int | None:
        """Returns when all serve; or else the exit code of one that could not begin."""
        complete = asyncio.ensure_future(self._complete.wait())
        awaited: list[asyncio.Future[Any]] = [complete, self._failed]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        return self._failed.result() if self._failed.done() else None

    async def wait_ended(self) -> None:
        """Returns when all have ended, after `end`."""
        await asyncio.wait(self._tasks)

    def end(self) -> None:
        """They drain; told again, they end at once."""
        self._stopping = True
        for seat, task in enumerate(self._tasks):
            if seat in self._running:
                self._running[seat].signal(signal.SIGTERM)
            else:
                task.cancel()  # it was about to be started again

    def metrics(self) -> Iterator[Family]:
        """How it is with the workers."""
        return metrics(len(self.up), self.restarts)

    async def ask_all(self, method: str, path: str, **told: Any) -> dict[int, httpx.Response]:
        """What those answer that do, by seat."""
        workers = list(self.up.values())
        answers = await asyncio.gather(*(worker.ask(method, path, **told) for worker in workers))
        found = {worker.seat: answer for worker, answer in zip(workers, answers, strict=True) if answer is not None}
        return dict(sorted(found.items()))

    async def hear_all(self, timeout_s: float) -> None:
        """What each counts now goes into `sum`. Who does not answer in time is taken at its last word."""
        self.sum.tell("supervisor", self._log.metrics())
        tasks = [asyncio.create_task(self._hear(worker)) for worker in self.up.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _hear(self, worker: Worker) -> None:
        async with worker.hearing:
            answer = await worker.ask("GET", "/families")
        if answer is not None and answer.status_code == httpx.codes.OK and self.up.get(worker.seat) is worker:
            self.sum.tell(worker.name, unpacked(answer.content))

    async def spread(self) -> None:
        """Every worker has the orders when this returns. One that does not take them is started again, and has them
        then."""
        async with self._spreading:
            late = [worker for worker in self.up.values() if worker.holds != self._orders.version]
            await asyncio.gather(*(self._bring(worker) for worker in late))

    async def _bring(self, worker: Worker) -> None:
        worker.holds, changes = self._orders.version, self._orders.changes
        answer = await worker.ask("POST", "/take", content=self._orders.text.encode(), timeout=TAKE_S)
        if answer is None or answer.status_code != httpx.codes.OK:
            said = answer.text if answer is not None else "no answer"
            logger.error("worker %d does not take the configuration, and is started again: %s", worker.seat, said)
            worker.signal(signal.SIGKILL)
            return
        for action, pool, url in changes:
            await worker.ask("POST", f"/admin/backends/{action}", json={"pool": pool, "url": url})

    async def _keep(self, seat: int) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began_at = self._clock()
            try:
                code = await self._run(seat)
            except OSError as error:  # no memory or no descriptors now
                logger.error("worker %d cannot be started: %s", seat, error)
                code = 1
            if self._stopping:
                return
            if not self._complete.is_set():
                if not self._failed.done():
                    self._failed.set_result(code if code > 0 else 1)
                return
            if self._clock() - began_at > STEADY_S:
                pause_s = FIRST_PAUSE_S
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            logger.warning("worker %d ended by %s, and is started again in %g s", seat, how, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self.restarts += 1

    async def _run(self, seat: int) -> int:
        """One worker from start to end. Returns how it ended."""
        admin = self._folder / f"{seat}.sock"
        admin.unlink(missing_ok=True)
        async with _process(self._log) as process:
            worker = self._running[seat] = Worker(seat, admin, process, self._orders.version)
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(self._orders.order(admin))
                if await process.stdout.readline():
                    await self._join(worker)
                return await process.wait()
            finally:
                self._running.pop(seat)
                self.up.pop(seat, None)
                self.sum.end(worker.name)
                await worker.client.aclose()

    async def _join(self, worker: Worker) -> None:
        """It serves. What was ordered while it began is made up for before it counts as one of them."""
        while worker.holds != self._orders.version and worker.process.returncode is None:
            await self._bring(worker)
        if worker.process.returncode is None:
            self.up[worker.seat] = worker
        if len(self.up) == self.count:
            self._complete.set()


def metrics(up: int, restarts: int) -> Iterator[Family]:
    """How many serve, and how often one had to be started again."""
    yield Gauge("headrace_workers", "Worker processes that serve, with `serve --workers`.", total="sum").of({(): up})
    ended = Counter("headrace_worker_restarts_total", "Workers that ended and were started again.")
    ended.values[()] = restarts
    yield ended


@asynccontextmanager
async def _process(log: LogWriter) -> AsyncIterator[Process]:
    """A worker that waits for its order, in a session of its own: what a terminal sends is for the supervisor. What it
    says goes to `log`, line by line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.worker"), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    assert process.stderr is not None
    relay = asyncio.create_task(_relay(process.stderr, log))
    try:
        yield process
        await relay
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        relay.cancel()


async def _relay(reader: asyncio.StreamReader, log: LogWriter) -> None:
    rest = b""
    while data := await reader.read(65536):
        lines = (rest + data).splitlines(keepends=True)
        rest = lines.pop() if not lines[-1].endswith(b"\n") else b""
        for line in lines:
            log.write(line)
    if rest:
        log.write(rest + b"\n")
