"""The watch of the file goes on, whatever becomes of the file."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.config import Config, load
from gateway.reload import Reloader

pytestmark = pytest.mark.anyio
TEXT = 'pools: {p: {backends: [{url: "http://127.0.0.1:1"}]}}\nmodels: {m: {}}\n'


@dataclass
class Held:
    """A configuration that holds, and whose it is."""

    settings: Config
    number: int = 1

    @property
    def generation(self) -> Held:
        return self

    def apply(self, settings: Config) -> None:
        self.settings, self.number = settings, self.number + 1


async def test_a_file_that_cannot_be_looked_at_is_a_problem_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file server has lost it: that is told, and it is taken when it is there again."""
    path = tmp_path / "headrace.yaml"
    path.write_text(TEXT)
    held, stat, lost = Held(load(path)), Path.stat, True

    def stale(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if lost and self == path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(self, follow_symlinks=follow_symlinks)

    reloader = Reloader(path, held, time.time)
    monkeypatch.setattr(Path, "stat", stale)
    path.unlink()
    report = await reloader.reload("file")
    assert [problem.message for problem in report.problems] == ["cannot be read: No such file or directory"]
    lost = False
    path.write_text(TEXT + "server: {drain: 5s}\n")
    assert (await reloader.reload("file")).result == "applied"
    assert held.number == 2
