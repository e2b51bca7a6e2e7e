"""`headrace logs`: request logs for people."""

from __future__ import annotations

import heapq
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from gateway.logs import LogLine
from gateway.requestlog import RequestLine

Line = dict[str, Any]
WORST = ("ttft", "itl", "total", "queue", "bytes_in", "bytes_out", "tokens_in", "tokens_out", "attempts")
COLOURS = {"ok": "green", "client_disconnect": "yellow"}
SHOWN = 20  # of the worst
POLL_S = 0.2
STATUS = re.compile(r"[1-5](?:xx|[0-9]{2})")

_log = msgspec.json.Decoder(LogLine).decode
_read = msgspec.json.Decoder(RequestLine).decode


def _status(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    if text is not None and not STATUS.fullmatch(text):
        raise click.BadParameter(f"read {text!r}: a status such as 429 was expected, or a kind such as 5xx")
    return text


@click.command()
@click.argument("files", nargs=-1, default=("-",), type=click.File("r", "utf-8", "replace", lazy=True))
@click.option("-f", "--follow", is_flag=True, help="Then wait for more, as `tail -F` does. Ctrl-C ends it.")
@click.option(
    "--outcome",
    "outcomes",
    multiple=True,
    metavar="WORD",
    help="Only these outcomes; `bad`: all but ok; `slow`: good ones that missed an objective.",
)
@click.option("--status", callback=_status, metavar="CODE", help="Only this status, or this kind: 429, 5xx.")
@click.option("--tenant", metavar="NAME", help="Only of this tenant.")
@click.option("--model", metavar="NAME", help="Only for this model.")
@click.option("--id", "ident", metavar="ID", help="Only the request, or the trace, with this id.")
@click.option("--worst", type=click.Choice(WORST), help=f"The {SHOWN} with the largest value, worst first.")
@click.option("--json", "as_json", is_flag=True, help="The lines as they were, for jq.")
def logs(files: tuple[IO[str], ...], worst: str | None, follow: bool, as_json: bool, **wanted: Any) -> None:
    """Show request logs.

    Reads the files, or stdin: `kubectl logs -f deploy/headrace | headrace logs`.

    \b
    headrace logs headrace.log
    headrace logs --follow --outcome bad --outcome slow headrace.log
    headrace logs --status 5xx --tenant acme headrace.log
    headrace logs --worst ttft headrace.log
    headrace logs --json --model llama-3-8b headrace.log | jq .total_ms

    Times are in UTC, durations in milliseconds. What the gateway says
    besides is shown too, unless requests are chosen; other lines are
    passed on as they are.
    """
    if any(file.name == "-" for file in files) and sys.stdin.isatty():
        raise click.UsageError("Give a file, or pipe a log in.")
    if follow and (worst is not None or len(files) != 1 or files[0].name == "-"):
        raise click.UsageError("--follow is for one file, and for no --worst.")
    stream = followed(files[0].name) if follow else (text for file in files for text in file)
    with suppress(KeyboardInterrupt):
        _show(stream, worst, as_json, wanted)


def _show(stream: Iterable[str], worst: str | None, as_json: bool, wanted: Line) -> None:
    if worst is not None:
        field = worst if worst.startswith(("bytes", "tokens", "attempts")) else f"{worst}_ms"
        lines = (line for _, line in _chosen(stream, wanted) if line is not None and line.get(field) is not None)
        for bad in heapq.nlargest(SHOWN, lines, key=lambda line: float(line[field])):
            click.echo(json.dumps(bad, ensure_ascii=False) if as_json else told(bad))
        return
    for text, line in _chosen(stream, wanted):
        click.echo(text if as_json else said(text) if line is None else told(line) + "\n", nl=False)


def followed(name: str, poll_s: float = POLL_S) -> Iterator[str]:
    """Whole lines of a file for ever: from its beginning, on as it grows, and from the beginning of another that takes
    its name or when it is cut (log rotation)."""
    while True:
        with Path(name).open("rb") as file:
            kept, torn = os.fstat(file.fileno()), b""
            while True:
                torn += file.readline()
                if torn.endswith(b"\n"):
                    yield torn.decode(errors="replace")
                    torn = b""
                    continue
                try:
                    now = Path(name).stat()
                except FileNotFoundError:
                    now = kept  # it is being rotated
                if now.st_ino != kept.st_ino or now.st_size < file.tell():
                    break
                time.sleep(poll_s)


def _chosen(stream: Iterable[str], wanted: Line) -> Iterator[tuple[str, Line | None]]:
    """Every line that is wanted, and what it says; None where it is no request."""
    only = any(wanted.values())
    for text in stream:
        line = _request(text)
        if (line is None and not only) or (line is not None and _matches(line, **wanted)):
            yield text, line


def _request(text: str) -> Line | None:
    """None also for what only looks like a request: whoever else writes to the same log may write anything."""
    try:
        if not text.startswith("{") or _read(text).event != "request":
            return None
    except msgspec.DecodeError:
        return None
    line: Line = json.loads(text)
    return line


def _matches(
    line: Line,
    outcomes: tuple[str, ...],
    status: str | None,
    tenant: str | None,
    model: str | None,
    ident: str | None,
) -> bool:
    kind = "bad" if line["outcome"] != "ok" else "slow" if line.get("cause") else "good"
    return (
        (not outcomes or line["outcome"] in outcomes or kind in outcomes)
        and status in (None, str(line["status"]), f"{line['status'] // 100}xx")
        and tenant in (None, line["tenant"])
        and model in (None, line["model"])
        and ident in (None, line["request_id"], line["upstream_request_id"], line.get("trace_id"))
    )


def said(text: str) -> str:
    """What is no request: a message of the gateway's own with its traceback, anything else as it is."""
    try:
        line = _log(text)
    except msgspec.DecodeError:
        return text
    at = datetime.fromtimestamp(line.time, UTC).strftime("%H:%M:%S.%f")[:-3]
    level = click.style(f"{line.level:<20}", fg=None if line.level == "info" else "red")
    return "\n".join(part for part in (f"{at}  {level} {line.message}", line.traceback) if part) + "\n"


def told(line: Line) -> str:
    """One request on one line: when, what became of it, for whom, how long it took, how much it was, where it went."""
    at = datetime.fromtimestamp(line["time"], UTC).strftime("%H:%M:%S.%f")[:-3]
    outcome = click.style(f"{line['outcome']:<20}", fg=COLOURS.get(line["outcome"], "red"))
    whose = f"{line['tenant'] or '-'}/{line['model'] or '-'}/{line['class']}"
    times = [f"{name} {_ms(line.get(f'{name}_ms'))}" for name in ("queue", "ttft", "itl", "total")]
    size = f"{_number(line['tokens_in'])}>{_number(line['tokens_out'])} tokens"
    if line["tokens_cached"]:
        size += f" ({line['tokens_cached']} cached)"
    parts = [at, outcome, str(line["status"] or "-"), whose, *times, size, line["backend"] or "-"]
    if line["attempts"] > 1:
        parts.append(f"{line['attempts']} attempts")
    if line.get("cause"):
        parts.append(click.style(f"missed by {line['cause']}", fg="yellow"))
    return "  ".join([*parts, line["request_id"]])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
