"""`headrace emulate`: a backend without a GPU."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket

import click
import uvloop

from loadtests.emulator import Emulator, Settings
from loadtests.faults import FAULTS, Told, parse
from loadtests.profiles import MS, PROFILES, Profile


def _described() -> str:
    """The tables at the end of the help."""
    engines = "\n".join(f"  {name:<22}{_pace(profile)}" for name, profile in PROFILES.items())
    faults = "\n".join(f"  {name:<22}{fault.help}" for name, fault in FAULTS.items())
    return f"\b\nEngines:\n{engines}\n\n\b\nFaults (ARG has a default):\n{faults}"


def _pace(profile: Profile) -> str:
    alone_ms = profile.step_ps(1, 0, 0, 0, 0) / MS
    return f"a token every {alone_ms:.1f} ms for one stream, {profile.kv_tokens // 1000}k tokens of KV cache"


def _faults(_: click.Context, __: click.Parameter, told: tuple[str, ...]) -> tuple[Told, ...]:
    try:
        return tuple(map(parse, told))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(epilog=_described())
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--model", default="m", show_default=True, help="The name of the model it serves.")
@click.option("--engine", type=click.Choice(list(PROFILES)), default="llama-3-8b-h100", show_default=True)
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Times as fast.")
@click.option("--seed", type=int, default=0, show_default=True, help="What it says: the same seed, the same answers.")
@click.option("--chunk", type=click.IntRange(1), default=8192, show_default=True, help="Tokens per engine step.")
@click.option("--max-seqs", type=click.IntRange(1), default=1024, show_default=True, help="Requests that run at once.")
@click.option("--kv-tokens", type=click.IntRange(64), help="Of KV cache.  [default: what its GPUs hold]")
@click.option("--mean-output-tokens", type=click.FloatRange(0, min_open=True), default=128.0, show_default=True,
              help="Of answers that nobody limits, beyond `min_tokens`.")  # fmt: skip
@click.option("--fault", "faults", multiple=True, metavar="NAME[:ARG][@RATE]", callback=_faults, help="See below.")
@click.option("--json", "as_json", is_flag=True, help="Announce the address as JSON on stdout.")
def emulate(
    port: int,
    host: str,
    model: str,
    engine: str,
    speed: float,
    seed: int,
    faults: tuple[Told, ...],
    as_json: bool,
    chunk: int,
    max_seqs: int,
    kv_tokens: int | None,
    mean_output_tokens: float,
) -> None:
    """Emulate a backend, without a GPU.

    It acts as a continuously batching engine with a model on its GPUs: speaks the OpenAI and Anthropic APIs, has
    vLLM's metrics, takes as long as the engine would, caches prefixes and counts tokens. Its answers mean nothing.

    \b
    headrace emulate --port 8001 --model m --engine llama-3-8b-h100
    headrace emulate --port 8002 --speed 10
    headrace emulate --port 8003 --fault reset-after:5@0.1 --fault 429:7@0.05

    A fault hits every request, or the share @RATE of them. One request asks for one by its header
    x-emulate-fault: NAME[:ARG]. Ctrl-C or SIGTERM ends it, and drops what is open.
    """
    settings = Settings(
        model=model, engine=engine, speed=speed, faults=faults, seed=seed,
        chunk=chunk, max_seqs=max_seqs, kv_tokens=kv_tokens, mean_output_tokens=mean_output_tokens,
    )  # fmt: skip
    try:
        uvloop.run(_serve(settings, host, port, as_json))
    except OSError as error:
        reason = f"cannot listen on {host}:{port}: {_why(error)}"
        raise click.ClickException(f"{reason}; choose another --port (0 takes a free one) or --host.") from error


def _why(error: OSError) -> str:
    """asyncio puts the address into what it says, and a resolver's errors are not those of the system."""
    known = error.errno is not None and not isinstance(error, socket.gaierror)
    return os.strerror(error.errno or 0) if known else error.strerror or str(error)


async def _serve(settings: Settings, host: str, port: int, as_json: bool) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Emulator(settings).serve(host, port) as server:
        if as_json:
            click.echo(json.dumps({"url": server.url, "model": settings.model, "engine": settings.engine}))
        else:
            pace = f" at {settings.speed:g} times its speed" if settings.speed != 1 else ""
            click.echo(f"{settings.engine}{pace} serves model {settings.model!r} on {server.url}/v1", err=True)
        await stopped.wait()
