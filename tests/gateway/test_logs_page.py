"""docs/logs.md lists the fields of a line. `python -m tests.gateway.test_logs_page` renews it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.exchange import Dialect, Endpoint, Exchange
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
        ((), "abc"),
        (("--outcome", "bad"), "bc"),
        (("--outcome", "queue_full"), "c"),
        (("--tenant", "acme"), "ab"),
        (("--model", "m", "--outcome", "ok"), "a"),
        (("--id", "b"), "b"),
        (("--worst", "total"), "cab"),
        (("--worst", "ttft"), "a"),
    ],
)
def test_lines_are_chosen(arguments: tuple[str, ...], ids: str) -> None:
    """By outcome, tenant, model, id; or the worst of them first."""
    given = "".join(
        [
            line(request_id="a", tenant="acme", model="m", outcome="ok", total_ms=20.0, ttft_ms=3.0),
            line(request_id="b", tenant="acme", model="n", outcome="upstream_error", total_ms=10.0),
            line(request_id="c", tenant="beta", model="m", outcome="queue_full", total_ms=30.0),
        ]
    )
    found = [json.loads(each)["request_id"] for each in shown("--json", *arguments, given=given)]
    assert "".join(found) == ids
    assert len(shown(*arguments, given=given)) == len(ids)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + table())
