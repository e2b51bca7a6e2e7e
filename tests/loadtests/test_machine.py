"""CPU time and memory as /proc has them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from loadtests import machine


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that says "ready", then does as the code says until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_cpu_time_of_threads_and_children_is_counted() -> None:
    """Half a CPU second burnt in a thread of a grandchild is found from the grandparent."""
    spin = "end = time.thread_time() + 0.5\n    while time.thread_time() < end: pass"
    body = f"import threading, time\ndef work():\n    {spin}\n    print('done', flush=True); time.sleep(60)\n"
    grandchild = repr(body + "print('ready', flush=True)\nthreading.Thread(target=work).start()")
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {grandchild}])"
    with child(code) as process:
        pids = machine.tree(process.pid)
        before = machine.cpu_ns(pids)
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        spent_s = machine.spent_s(before, machine.cpu_ns(machine.tree(process.pid)))
        os.kill(pids[-1], 9)
    assert len(pids) == 2
    assert 0.4 < spent_s < 1.0


def test_resident_memory_grows_by_what_is_touched() -> None:
    """32 MB written are 32 MB resident."""
    code = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    grow = "import time\nprint('ready', flush=True)\nb = b'x' * 32_000_000\nprint('grown', flush=True)\ntime.sleep(60)"
    with child(code) as small, child(grow) as large:
        assert large.stdout is not None
        assert large.stdout.readline() == "grown\n"
        difference = machine.rss_bytes([large.pid]) - machine.rss_bytes([small.pid])
    assert 30e6 < difference < 40e6


def test_a_process_that_is_gone_counts_nothing() -> None:
    """A pid that ended between the look at the tree and the look at the process is no error."""
    with child("print('ready', flush=True)\nimport time; time.sleep(60)") as process:
        pid = process.pid
    assert machine.cpu_ns([pid]) == {}
    assert machine.rss_bytes([pid]) == 0


def test_pinning_is_inherited_and_undone() -> None:
    """What starts inside the block runs on the core; afterwards we are where we were."""
    before = os.sched_getaffinity(0)
    core = machine.cores()[1]
    with machine.pinned(core), child("print('ready', flush=True)\nimport time; time.sleep(60)") as process:
        assert os.sched_getaffinity(process.pid) == {core}
    assert os.sched_getaffinity(0) == before


def test_a_spinning_core_is_seen_as_busy() -> None:
    """The core that we burn for 0.3 s is busy for about that long."""
    core = machine.cores()[1]
    with machine.pinned(core):
        before = machine.core_busy_s(core)
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    assert machine.core_busy_s(core) - before > 0.25
