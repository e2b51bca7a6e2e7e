"""One worker of several: `python -m gateway.worker`, told on stdin what to serve, and gone when that is closed.

The first line of stdin is a JSON object, an `Order`. After that nothing comes: stdin ends when the supervisor does,
however that happens, and then the worker ends, too. It says `ready` on stdout once it serves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from gateway.admin import Change
from gateway.config import ConfigError, parse
from gateway.descriptors import NoRoom
from gateway.discovery import Undiscoverable
from gateway.logs import log_to_stderr
from gateway.serve import Seat, serve

STDIN, STDOUT, STDERR = 0, 1, 2
END_S = 5.0  # from the supervisor's end to an end that nothing delays


class Order(msgspec.Struct, frozen=True):
    """What a worker is to do. `text` is the configuration, `path` the file that it came from; `admin` is where its
    private socket will be."""

    text: str
    path: str
    admin: str
    changes: tuple[Change, ...] = ()


def main() -> None:
    """Serve until told to end. Exit codes are those of `headrace serve`."""
    order = msgspec.json.decode(_line(), type=Order)
    threading.Thread(target=_outlive_nobody, args=(Path(order.admin),), daemon=True).start()
    path = Path(order.path)
    try:
        settings = parse(order.text, order.path, folder=path.parent)
        log_to_stderr(settings.telemetry.log)
        seat = Seat(Path(order.admin), order.changes)
        uvloop.run(serve(settings, path, seat=seat, ready=_ready))
    except ConfigError as error:
        os.write(STDERR, f"{error}\n".encode())
        sys.exit(2)
    except (NoRoom, Undiscoverable, OSError) as error:
        sys.exit(f"Error: {getattr(error, 'strerror', None) or error}")


def _ready(_: str, __: str) -> None:
    os.write(STDOUT, b"ready\n")


def _line() -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        piece = os.read(STDIN, 65536)
        if not piece:
            sys.exit(1)  # the supervisor is gone already
        found += piece
    return found


def _outlive_nobody(admin: Path) -> None:
    """In a thread, since the event loop may be what hangs. Two signals are the order to end at once."""
    while os.read(STDIN, 4096):
        pass
    with suppress(OSError):
        admin.unlink()
        admin.parent.rmdir()  # whoever is the last
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    main()
