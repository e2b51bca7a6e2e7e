"""What commands write, where it cannot be written as it is: a full disk, a terminal of another alphabet, no colours."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

import click

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Commands(click.Group):
    """A group of commands whose output ends in a line that says why, never in a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a question mark for what a terminal of Latin letters lacks
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at the end
            raise click.ClickException(f"the output cannot be written: {error.strerror}") from error
