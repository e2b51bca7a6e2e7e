"""A little load, for looking at: `python -m loadtests.trickle http://127.0.0.1:8080 [--rate 3] [--model NAME]`

Conversations that grow turn by turn, streamed, and some batch work; the pace varies, so that there is something to
see. Answers are read and forgotten, refusals obeyed. SIGTERM or Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from math import pi, sin
from random import Random
from typing import Any

import httpx

KEYS = {"sk-demo": 0.8, "sk-bulk": 0.2}  # and how much of the load has each
TURNS = 4
PERIOD_S = 60.0  # of the pace, between half and one and a half times the rate
SYSTEM = "You are the assistant of a power station. Be brief, and name your sources. " * 12


async def until_told(url: str, model: str, rate: float, rng: Random) -> None:
    """The load, until a signal ends it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await main(url, model, rate, rng)


async def main(url: str, model: str, rate: float, rng: Random) -> None:
    """Until it is cancelled."""
    loop = asyncio.get_running_loop()
    timeout = httpx.Timeout(120, connect=10)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http, asyncio.TaskGroup() as tasks:
        while True:
            pace = rate / TURNS * (1 + 0.5 * sin(2 * pi * loop.time() / PERIOD_S))
            await asyncio.sleep(rng.expovariate(pace))
            (key,) = rng.choices(list(KEYS), list(KEYS.values()))
            tasks.create_task(_forgiving(conversation(http, model, key, rng)))


async def conversation(http: httpx.AsyncClient, model: str, key: str, rng: Random) -> None:
    """A few turns, each with all that was said before."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        question = " ".join(f"{rng.choice(WORDS)}-{rng.randrange(100)}" for _ in range(rng.randrange(20, 120)))
        messages.append({"role": "user", "content": f"Turn {turn}: {question}?"})
        asked = {"model": model, "messages": messages, "stream": True, "max_tokens": rng.randrange(16, 160)}
        headers = {"authorization": f"Bearer {key}"}
        async with http.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as answer:
            said = sum([len(piece) async for piece in answer.aiter_bytes()])
        if answer.status_code != httpx.codes.OK:
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
        messages.append({"role": "assistant", "content": f"An answer of {said} bytes."})
        await asyncio.sleep(rng.expovariate(2.0))


async def _forgiving(work: Coroutine[Any, Any, None]) -> None:
    """A gateway that restarts is no reason to end."""
    with suppress(httpx.HTTPError):
        await work


WORDS = "water turbine gate flow level pressure spill intake penstock runner shaft grid load valve dam".split()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second, on average")
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    asyncio.run(until_told(told.url.rstrip("/"), told.model, told.rate, Random(told.seed)))
