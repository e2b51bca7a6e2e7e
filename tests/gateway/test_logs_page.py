"""docs/logs.md lists the fields of a line. `python -m tests.gateway.test_logs_page` renews it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.exchange import Dialect, Endpoint, Exchange
from gateway.logview import followed
from gateway.requestlog import MEANINGS, RequestLine, request_line
from gateway.timeline import Cause

PAGE = Path(__file__).parents[2] / "docs" / "logs.md"
MARK = "## Fields\n"


def line(**fields: object) -> str:
    """A line as the gateway writes it, with some fields of our own."""
    x = Exchange("req_1", 100.0, Endpoint("/v1/chat/completions", Dialect.CHAT, generates=True))
    x.end(101.5)
    told = json.loads(request_line(x, None, 1_700_000_000.25, Cause.QUEUE, 0.0))
    assert told["total_ms"] == 1500 and told["cause"] == "queue"
    return json.dumps(told | fields) + "\n"


def table() -> str:
    """The generated part of the page."""
    return MARK + "\n| field | meaning |\n|---|---|\n" + "".join(f"| `{k}` | {v} |\n" for k, v in MEANINGS.items())


def test_the_page_lists_every_field() -> None:
    """In the order of the line. If this fails: python -m tests.gateway.test_logs_page"""
    assert tuple(MEANINGS) == RequestLine.__struct_encode_fields__ == tuple(json.loads(line()))
    page = PAGE.read_text()
    assert page[page.index(MARK) :] == table()
    assert msgspec.json.decode(line(), type=RequestLine).class_ == "interactive"


def shown(*arguments: str, given: str) -> list[str]:
    result = CliRunner().invoke(main, ["logs", *arguments], input=given)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_what_the_gateway_says_besides_is_shown_too() -> None:
    """With its traceback on lines of its own; not among requests that were chosen, and for jq as it was."""
    said = {"time": 1_700_000_000.25, "level": "error", "message": "it failed", "event": "log", "traceback": "T\nE: x"}
    text = json.dumps(said) + "\n"
    assert shown(given=text) == ["22:13:20.250  error                it failed", "T", "E: x"]
    assert shown("--json", given=text) == [text.rstrip()]
    assert shown("--outcome", "bad", given=text) == []


def test_a_line_is_shown_on_a_line() -> None:
    """When, what became of it, whose it was, its times; what is no request stays as it is."""
    told = line(tenant="acme", model="m", outcome="ok", status=200, ttft_ms=12.34, tokens_in=5, tokens_out=7)
    first, second, third = shown(given=told + "headrace serves http://x\n" + '{"torn": \n')
    assert first.startswith("22:13:20.250  ok ") and "acme/m/interactive" in first
    assert "ttft 12.3" in first and "total 1500" in first and "5>7 tokens" in first and "missed by queue" in first
    assert (second, third) == ("headrace serves http://x", '{"torn": ')


@pytest.mark.parametrize("arguments", [(), ("--worst", "total"), ("--tenant", "acme")])
def test_what_only_looks_like_a_request_stays_as_it_is(arguments: tuple[str, ...]) -> None:
    """Other programs write to the same log: fields that are missing, or of another kind, are not read."""
    strange = ['{"event":"request"}', line(total_ms="long").strip(), "{}", "[1]"]
    assert shown(*arguments, given="\n".join(strange) + "\n") == ([] if arguments else strange)


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ((), "abcd"),
        (("--outcome", "bad"), "bc"),
        (("--outcome", "queue_full"), "c"),
        (("--tenant", "acme"), "ab"),
        (("--model", "m", "--outcome", "ok"), "a"),
        (("--outcome", "slow"), "d"),
        (("--outcome", "slow", "--outcome", "queue_full"), "cd"),
        (("--status", "503"), "c"),
        (("--status", "5xx"), "c"),
        (("--status", "2xx", "--tenant", "acme"), "a"),
        (("--id", "b"), "b"),
        (("--worst", "total"), "cabd"),
        (("--worst", "ttft"), "a"),
    ],
)
def test_lines_are_chosen(arguments: tuple[str, ...], ids: str) -> None:
    """By outcome, tenant, model, id; or the worst of them first."""
    given = "".join(
        [
            line(
                request_id="a", tenant="acme", model="m", outcome="ok", cause="", total_ms=20.0, ttft_ms=3.0, status=200
            ),
            line(request_id="b", tenant="acme", model="n", outcome="upstream_error", total_ms=10.0, status=0),
            line(request_id="c", tenant="beta", model="m", outcome="queue_full", total_ms=30.0, status=503),
            line(request_id="d", tenant="beta", model="n", outcome="ok", total_ms=5.0, status=200),
        ]
    )
    found = [json.loads(each)["request_id"] for each in shown("--json", *arguments, given=given)]
    assert "".join(found) == ids
    assert len(shown(*arguments, given=given)) == len(ids)


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)])
def test_no_colours_where_none_are_wanted(environ: dict[str, str], coloured: bool) -> None:
    """In a terminal, which has them otherwise (https://no-color.org)."""
    said = CliRunner(env={"NO_COLOR": None} | environ).invoke(main, ["logs"], input=line(outcome="ok"), color=True)
    assert ("\x1b[32m" in said.output) is coloured


@pytest.mark.parametrize("status", ["6xx", "abc", "5XX ", "42", "1000"])
def test_a_status_that_there_is_not_is_refused(status: str) -> None:
    """No line would ever match it, which at night reads as: nothing is wrong."""
    ended = CliRunner().invoke(main, ["logs", "--status", status], input=line())
    assert ended.exit_code == 2
    assert "429" in ended.output and "5xx" in ended.output


def test_a_file_is_followed_through_its_rotation(tmp_path: Path) -> None:
    """Whole lines as they come, from its beginning, and on in the file that takes its place."""
    path = tmp_path / "headrace.log"
    path.write_text("one\ntw")
    lines = followed(str(path), poll_s=0.01)
    assert next(lines) == "one\n"
    with path.open("a") as file:
        file.write("o\n")
    assert next(lines) == "two\n"
    path.rename(tmp_path / "headrace.log.1")
    path.write_text("three\n")
    assert next(lines) == "three\n"
    path.write_text("4\n")  # cut, and written anew
    assert next(lines) == "4\n"


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    """`headrace logs FILE | head -1`."""
    path = tmp_path / "headrace.log"
    path.write_text(line() * 20_000)
    command = f"{sys.executable} -m gateway.cli logs {path} | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + table())
