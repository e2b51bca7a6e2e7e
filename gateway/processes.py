"""Programs of ours that run beside this one, and end with the block that started them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 60.0  # a slow disk, and a machine that does something else
END_S = 5.0  # from the wish that a program ends to the order


class StartFailed(Exception):
    """A program did not come up; the text ends with what it said last."""


@dataclass(frozen=True, slots=True)
class Running:
    """A program that is up. `announced` is the JSON object that it printed on stdout once it was ready."""

    process: subprocess.Popen[bytes]
    announced: dict[str, Any]


@contextmanager
def running(module: str, arguments: Sequence[str], log: Path, **environ: str) -> Iterator[Running]:
    """`python -m module arguments` until the block ends; what it says on stderr goes to `log`. Raises StartFailed."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(  # noqa: S603 (this interpreter, and a module of ours)
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | environ,
        )
    try:
        yield Running(process, _announced(process, log, " ".join([module, *arguments])))
    finally:
        _end(process)


@contextmanager
def serving(command: Sequence[str], log: Path, port: int, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Any program, until the block ends; ready when it accepts connections at `port` of this machine. What it says goes
    to `log`. Raises StartFailed."""
    with log.open("wb") as said:
        process = subprocess.Popen(  # noqa: S603 (the caller's word)
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | environ
        )
    try:
        _accepts(process, log, port)
        yield process
    finally:
        _end(process)


def _accepts(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        with socket.socket() as sock:
            if not sock.connect_ex(("127.0.0.1", port)):
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(f"{process.args!r} did not come up:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _announced(process: subprocess.Popen[bytes], log: Path, name: str) -> dict[str, Any]:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_S)
    line = process.stdout.readline() if readable else b""
    if not line:
        why = "ended" if readable else f"was not ready after {READY_S:g} s"
        said = log.read_text(errors="replace").strip()[-2000:]
        raise StartFailed(f"{name} {why}" + (f":\n{said}" if said else "."))
    announced: dict[str, Any] = json.loads(line)
    return announced


def _end(process: subprocess.Popen[bytes]) -> None:
    """A wish, a second one (which a gateway that drains takes for an order), and an end that nothing withstands."""
    for ask in (process.terminate, process.terminate, process.kill):
        ask()
        try:
            process.wait(END_S / 2)
        except subprocess.TimeoutExpired:
            continue
        break
    if process.stdout is not None:
        process.stdout.close()
