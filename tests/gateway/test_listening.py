"""What a client's connection has from the socket that it was accepted on."""

from __future__ import annotations

import socket

from gateway.serve import PROBE_S, PROBES, SILENT_S, listen


def test_clients_that_vanish_are_probed() -> None:
    """The kernel asks a silent peer whether it is there, and gives it up within a minute."""
    with listen("127.0.0.1", 0) as server:
        server.setblocking(True)
        with socket.create_connection(server.getsockname()), server.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            told = [
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert told == [SILENT_S, PROBE_S, PROBES] and SILENT_S + PROBE_S * PROBES <= 60
