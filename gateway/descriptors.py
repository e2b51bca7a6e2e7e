"""Room for the connections that are promised: a process that runs out of file descriptors can accept nobody, and cannot
even tell anybody so."""

from __future__ import annotations

import resource

OWN = 256  # listeners, probes, the store, logs, and what Python opens for itself


class NoRoom(Exception):
    """The system allows fewer descriptors than the configuration promises."""


def connections(wanted: int, *, promised: bool) -> int:
    """How many client connections there may be, each with one to a backend; the process's limit is raised as far as the
    system allows. Raises NoRoom where fewer would be than were `promised`, and not only wanted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + OWN
    if hard != resource.RLIM_INFINITY and hard < needed:
        if promised:
            raise NoRoom(
                f"server.max_connections: {wanted} needs {needed} file descriptors, and the system allows {hard}: "
                f"raise the limit (ulimit -Hn, LimitNOFILE=) or set it to {fitting(hard)}"
            )
        needed, wanted = hard, fitting(hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return wanted


def fitting(descriptors: int) -> int:
    """The client connections for which so many descriptors suffice."""
    return max(1, (descriptors - OWN) // 2)
