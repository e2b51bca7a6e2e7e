"""What the machine says about a process: CPU time and memory of a whole tree, from /proc; and pinning to cores.

Linux only. CPU time is read per thread from /proc/PID/task/TID/schedstat (nanoseconds on the CPU, user and kernel
together); where the kernel does not keep it, from /proc/PID/stat (ticks of 10 ms).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROC = Path("/proc")
MISSING = (FileNotFoundError, ProcessLookupError)  # it ended while we looked


def cores() -> tuple[int, int]:
    """(the core of everything else, the core of the proxy); the same one twice where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Run on one core. Processes started meanwhile inherit it, before they have a thread of their own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def allow_many_files() -> int:
    """Raise the soft limit of open files to the hard one, for us and for what we start; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def tree(pid: int) -> list[int]:
    """`pid` and all that descends from it."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except MISSING:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def cpu_ns(pids: list[int]) -> dict[int, int]:
    """Nanoseconds on the CPU of every thread of the processes, by thread id."""
    spent: dict[int, int] = {}
    for pid in pids:
        for task in (PROC / str(pid) / "task").glob("*"):
            try:
                spent[int(task.name)] = _thread_ns(task)
            except MISSING:
                continue
    return spent


def _thread_ns(task: Path) -> int:
    schedstat = task / "schedstat"
    if schedstat.exists():
        return int(schedstat.read_text().split()[0])
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def spent_s(before: Mapping[int, int], after: Mapping[int, int]) -> float:
    """CPU seconds between two readings of `cpu_ns`. A thread born between them counts from its birth,
    one that ended is not counted: servers keep theirs."""
    return sum(ns - before.get(thread, 0) for thread, ns in after.items()) / 1e9


def core_busy_s(core: int) -> float:
    """CPU seconds that a core has spent on anything since it started, in steps of 10 ms."""
    line = next(each for each in (PROC / "stat").read_text().splitlines() if each.startswith(f"cpu{core} "))
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pids: list[int]) -> int:
    """Resident memory of the processes together; pages that they share count once for each."""
    total = 0
    for pid in pids:
        try:
            total += int((PROC / str(pid) / "statm").read_text().split()[1])
        except MISSING:
            continue
    return total * os.sysconf("SC_PAGE_SIZE")
