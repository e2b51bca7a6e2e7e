"""`headrace doctor`: what the metrics say about why requests are slow, and what to try."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import click
import httpx

from gateway.adminport import ADMIN, base, shown
from gateway.diagnosis import Diagnosis, diagnosis
from gateway.experiments import ADVICE
from gateway.facts import Facts, facts
from gateway.samples import Samples, Window, answered, read
from gateway.units import seconds

ALWAYS = "headrace_build_info"
FAMILIES = '{__name__=~"headrace_.+|process_cpu_seconds_total"}'
LIVE_S, STORED_S = 15.0, 600.0  # how far back it looks: while somebody waits, and where it is stored anyway
WIDTH = 110


def _span(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    try:
        found = None if text is None else seconds(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if found == 0:
        raise click.BadParameter("nothing happens in no time: give a longer one, such as 15s")
    return found


@click.command()
@click.argument("url", default=ADMIN, metavar="[URL]")
@click.option("--window", callback=_span, help="How far back.  [default: 10m of a Prometheus; of a gateway 15s ahead]")
@click.option("--json", "as_json", is_flag=True, help="All of it as one JSON object.")
def doctor(url: str, window: float | None, as_json: bool) -> None:
    """Say why requests may be slow, from the metrics of a Prometheus or of one running gateway.

    URL is either one; a gateway's is that of its admin port, whose /metrics is then read twice.

    \b
    headrace doctor                                  # the gateway on this machine
    headrace doctor http://prometheus:9090 --window 30m
    headrace doctor --json | jq '.hypotheses[0]'

    It tells the workload and what is not known of it, the objectives and how they are kept, hypotheses ranked by
    their evidence with how to tell whether they hold, and experiments. A hypothesis is no fact.
    """
    url = base(url, "URL")
    try:
        with httpx.Client(timeout=30, trust_env=False) as http:
            found = _window(http, url, window, told=not as_json)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(
            f"{shown(url)} does not answer: {error}. Give a Prometheus or an admin port."
        ) from error
    if not found.has(ALWAYS):
        raise click.ClickException(f"{shown(url)} knows no gateway: there is no {ALWAYS}. Is it scraped?")
    told = diagnosis(facts(found))
    if as_json:
        click.echo(json.dumps({"source": shown(url)} | told.document(), ensure_ascii=False))
    else:
        click.echo("\n".join(report(shown(url), told)))


def _window(http: httpx.Client, url: str, window: float | None, *, told: bool) -> Window:
    """Two readings, from whichever of both it is. `told`: whoever waits for the second is told so."""
    if http.get(f"{url}/api/v1/query", params={"query": "1"}).status_code == httpx.codes.OK:
        now, span = time.time(), window or STORED_S
        return Window(_stored(http, url, now - span), _stored(http, url, now), span)
    first, began_at = _scraped(http, url), time.monotonic()
    if not first.get(ALWAYS):
        raise click.ClickException(f"{shown(url)}/metrics is no gateway's: there is no {ALWAYS}.")
    if told:
        click.echo(f"Watching {shown(url)} for {window or LIVE_S:g} s ...", err=True)
    time.sleep(window or LIVE_S)
    last = _scraped(http, url)
    return Window(first, last, time.monotonic() - began_at)


def _scraped(http: httpx.Client, url: str) -> Samples:
    answer = http.get(f"{url}/metrics", headers={"accept": "text/plain"})
    if answer.status_code != httpx.codes.OK:
        raise click.ClickException(
            f"{shown(url)}/metrics answers {answer.status_code}. Give a Prometheus or an admin port."
        )
    return read(answer.text)


def _stored(http: httpx.Client, url: str, at: float) -> Samples:
    """Of gateways only: other processes have processor time, too."""
    answer = http.get(f"{url}/api/v1/query", params={"query": FAMILIES, "time": at})
    if answer.status_code != httpx.codes.OK:
        raise click.ClickException(f"{shown(url)} refuses a query: {answer.text[:200]}")
    results: list[dict[str, Any]] = answer.json()["data"]["result"]

    def where(each: dict[str, Any]) -> tuple[str, str]:
        return each["metric"].get("job", ""), each["metric"].get("instance", "")

    gateways = {where(each) for each in results if each["metric"]["__name__"] == "headrace_build_info"}
    return answered(each for each in results if where(each) in gateways)


# -- the report --------------------------------------------------------------------------------------------------


def report(source: str, told: Diagnosis) -> Iterator[str]:
    """Its lines, in the order in which to read them."""
    yield f"1. Workload ({source}, {told.facts.seconds:.0f} s)"
    yield from _rows(_workload(told.facts))
    yield "   Not known:"
    for text in told.missing:
        yield from _item(text)
    yield "\n2. Objectives and present values"
    yield from _rows(_objectives(told.facts))
    yield "\n3. Hypotheses, the leading first (no facts: see how to tell)"
    if not told.hypotheses:
        yield from _lines(f"   {told.conclusion}", 3)
    for number, each in enumerate(told.hypotheses, 1):
        advice = ADVICE[each.name]
        yield f"   {number}. {advice.title}  [{each.word}, {each.score:.2f}]"
        for evidence in sorted(each.evidence, key=lambda one: -abs(one.strength)):
            yield from _item(f"{'for:    ' if evidence.strength > 0 else 'against:'} {evidence.text}", 6)
        yield from _item(f"confirm: {advice.confirm}", 6)
        yield from _item(f"refute:  {advice.refute}", 6)
    yield "\n4. Experiments, the most promising first"
    if not told.experiments:
        yield "   None."
    for number, (name, experiment) in enumerate(told.experiments, 1):
        yield from _lines(f"   {number}. ({name}) {experiment.change}", 6)
        yield from _lines(f"      May cost: {experiment.trade_off}. Accept if: {experiment.accept}.", 6)


def _workload(facts: Facts) -> Iterator[tuple[str, str]]:
    rate = facts.requests / facts.seconds
    yield "requests", f"{facts.requests:.0f}, {rate:.2f} a second; {_shares(facts.outcomes, facts.requests)}"
    yield "models", _shares(facts.models, facts.requests)
    yield "classes", _shares(facts.classes, facts.requests)
    yield "tenants", _shares(facts.tenants, facts.requests)
    yield "tokens", f"{_plain(facts.prompt_tokens)} in, {_plain(facts.output_tokens)} out on average"
    yield "output", f"{facts.output_rate:.0f} tokens a second"
    found = facts.found_share
    expected = f"{found:.1f} times" if found is not None and found > 1.05 else f"{_share(found)} of"
    yield "cached", f"{_share(facts.cached_share)} of the prompts; {expected} what was expected"
    yield "now", f"{facts.in_flight:.0f} on {facts.backends} backends, {facts.queued:.0f} wait"
    yield "backends", ", ".join(f"{number:.0f} {state}" for state, number in facts.states.items()) or "not known"
    lag = "-" if facts.loop_lag_s is None else f"{facts.loop_lag_s * 1000:.0f} ms"
    yield (
        "gateway",
        f"loop {lag} late (p99), {_plain(facts.cores, 2)} cores a process, limits: {', '.join(facts.limiter) or '-'}",
    )


def _objectives(facts: Facts) -> Iterator[tuple[str, str]]:
    for each in facts.objectives:
        if each.met + each.missed:
            bound = "" if each.bound_s is None else f" within {each.bound_s * 1000:.0f} ms:"
            yield (
                f"{each.model} {each.name}",
                f"{bound} kept by {_share(each.share)} of {each.met + each.missed:.0f}".strip(),
            )
    yield "goodput", f"{_share(facts.goodput)} of {facts.judged:.0f}; lost to {_shares(facts.missed, 1.0) or 'nothing'}"
    for name, quantiles in (("first token", facts.ttft_s), ("gap", facts.itl_s)):
        yield name, ", ".join(f"{key} {_ms(value)}" for key, value in quantiles.items())
    parts = ", ".join(f"{part} {_ms(mean)}" for part, mean in facts.parts.items())
    yield "of which", f"{parts or '-'} (means)"


def _rows(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    told = list(rows)
    width = max(len(name) for name, _ in told) + 2
    for name, text in told:
        yield from _lines(f"   {name:<{width}}{text}", 3 + width)


def _item(text: str, indent: int = 5) -> Iterator[str]:
    yield from _lines(f"{' ' * indent}- {text}", indent + 2)


def _lines(text: str, indent: int) -> list[str]:
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False) or [""]


def _shares(counts: dict[str, float], whole: float) -> str:
    """`ok 98%, queue_full 2%`: the largest few."""
    return ", ".join(f"{name} {number / whole:.1%}" for name, number in list(counts.items())[:6]) if whole else "-"


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.1%}"


def _plain(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.1f} ms"
