"""How many streams one core carries through the emulator: `python -m loadtests.capacity [--streams 500] [--rate 50]`.

The emulator runs alone on a core, at the speed at which its engine gives every stream `rate` tokens a second; the
readers run on another. It carries them if the tokens arrive at that rate and the core is not full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from loadtests import machine
from loadtests.emulator import Emulator, Settings
from loadtests.loadgen import PROMPT, Clock, Crowd, Reader, Tally
from loadtests.peers import ROOT, Launch, free_port, running, wait_ready
from loadtests.phases import Rig, in_ms, require_clean, window
from loadtests.profiles import PROFILES

ENGINE = "llama-3-8b-h100"
SETTLE_S = 1.0
SHARE_ARRIVED = 0.97  # of the tokens that the rate promises: less is a stream that stumbles


def stream_request(tokens: int) -> bytes:
    """A stream of that many tokens."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "bench", "messages": messages, "stream": True, "ignore_eos": True, "max_tokens": tokens}
    encoded = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\ncontent-length: %d\r\n\r\n%b" % (len(encoded), encoded)


def speed_for(streams: int, rate: float, seconds: float) -> float:
    """The speed at which a full step takes 1 / rate seconds, for streams as long as they are in mid-window."""
    said = rate * (seconds / 2 + 2 * SETTLE_S)
    return rate * PROFILES[ENGINE].decoding_ps(1, streams, int(streams * (len(PROMPT) / 4 + said))) / 1e12


async def serve(port: int, streams: int, speed: float, tokens: int) -> None:
    """An engine with room for all of them, as large as it must be."""
    room = streams * (tokens + len(PROMPT))
    settings = Settings(model="bench", engine=ENGINE, speed=speed, max_seqs=max(1024, streams), kv_tokens=room)
    async with Emulator(settings).serve(port=port):
        await asyncio.Event().wait()


async def measure(streams: int, rate: float, seconds: float, clock: Clock, cores: tuple[int, int]) -> dict[str, float]:
    """Open the streams, settle, and count for `seconds`."""
    port, tally, tokens = free_port(), Tally(clock), int(rate * (seconds + 60))
    speed = speed_for(streams, rate, seconds)
    serving = [sys.executable, "-m", "loadtests.capacity", "--serve", str(port), str(streams), str(speed), str(tokens)]
    with tempfile.TemporaryDirectory() as dir_:
        log = Path(dir_) / "emulator.log"
        async with running(Launch(serving, {"PYTHONPATH": str(ROOT)}), log, cores[1]) as process:
            await wait_ready(process, port, clock, log)
            rig = Rig(clock, cores, port, port, process.pid, process.pid)
            async with Crowd(port) as crowd:
                request = stream_request(tokens)
                await crowd.join(streams, lambda: Reader(request, tally))
                await asyncio.sleep(SETTLE_S)
                spent = await window(rig, tally, seconds)
                require_clean(tally)
    return {
        "streams": streams,
        "tokens_per_s": tally.events / spent.wall_s,
        "share_arrived": tally.events / spent.wall_s / (streams * rate),
        "us_per_token": spent.proxy_s / max(1, tally.events) * 1e6,
        "emulator_cpu": spent.proxy_s / spent.wall_s,
        "client_cpu": spent.client_s / spent.wall_s,
        **in_ms(tally.all_gaps(), "gap"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    machine.allow_many_files()
    if arguments.serve:
        port, streams, speed, tokens = arguments.serve
        uvloop.run(serve(int(port), int(streams), float(speed), int(tokens)))
        return
    cores = machine.cores()
    with machine.pinned(cores[0]):
        found = uvloop.run(measure(arguments.streams, arguments.rate, arguments.seconds, time.perf_counter, cores))
    print(json.dumps(found, indent=2))
    carried = found["share_arrived"] >= SHARE_ARRIVED
    print("carried" if carried else "not carried: the emulator or the machine fell behind", file=sys.stderr)
    sys.exit(not carried)


if __name__ == "__main__":
    main()
