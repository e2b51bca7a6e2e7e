"""Clients that send chunked bodies without end, in a process of their own: `python -m tests.faults.pour PORT CLIENTS`.

Prints, for each client, the status that it was told and how many bytes it had sent by then.
"""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from select import select

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"40000\r\n" + b" " * 0x40000 + b"\r\n"


def pour(port: int) -> tuple[int, int]:
    """Until the server answers or hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        sent = client.send(HEAD)
        with suppress(ConnectionError):
            while not select([client], [], [], 0)[0]:
                sent += client.send(CHUNK)
        answer = client.recv(100)
        return int(answer.split(b" ")[1]) if answer else 0, sent


def main() -> None:
    port, clients = int(sys.argv[1]), int(sys.argv[2])
    with ThreadPoolExecutor(clients) as pool:
        for status, sent in pool.map(pour, [port] * clients):
            sys.stdout.write(f"{status} {sent}\n")


if __name__ == "__main__":
    main()
