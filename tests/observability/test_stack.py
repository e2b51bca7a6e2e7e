"""The stack: of processes for real, where nginx and Prometheus are; of containers as far as its files go."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.stack import KEY, MODEL, tool
from gateway.config import parse
from gateway.processes import StartFailed
from tests.observability.tools import NEEDED, ROOT

DIR = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((DIR / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: told for name, told in SERVICES.items() if told["image"] == "headrace"}


@pytest.fixture
def programs() -> None:
    """Without them the stack cannot be: skips, or fails where they are needed."""
    for name in ("prometheus", "nginx"):
        try:
            tool(name)
        except StartFailed as error:
            assert not NEEDED, error
            pytest.skip(str(error))


@pytest.mark.usefixtures("programs")
@pytest.mark.timeout(300)
def test_the_stack_comes_up_whole_and_goes_without_a_trace(tmp_path: Path) -> None:
    """Every check holds, and every process that it started has ended."""
    command = [sys.executable, "-m", "deploy.stack", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=marked(tmp_path), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok  ") == 8 and "NOT" not in done.stdout
    assert not left(tmp_path)


@pytest.mark.usefixtures("programs")
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_stack(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to all of its processes at once."""
    command = [sys.executable, "-m", "deploy.stack"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=marked(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said = ""
    while "Ctrl-C" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    assert left(tmp_path)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Everything is stopped." in rest
    assert not left(tmp_path)


def marked(folder: Path) -> dict[str, str]:
    """The environment of a stack whose processes can be told from those of others."""
    return os.environ | {"TMPDIR": str(folder)}


def left(folder: Path) -> list[str]:
    """Processes of its stack that run now."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if command and str(folder).encode() in command + environ:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_images_and_ports() -> None:
    """Of others by a version; to this machine only; ours cannot write, and have no rights to give away."""
    for name, told in SERVICES.items():
        assert told["image"] == "headrace" or re.fullmatch(r"[\w/.-]+:v?\d[\w.-]*", told["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in told.get("ports", [])), name
    for name, told in OURS.items():
        assert told["read_only"] and told["cap_drop"] == ["ALL"], name
        assert told["security_opt"] == ["no-new-privileges:true"], name
    assert OURS.keys() == {"gateway-1", "gateway-2", "backend-1", "backend-2", "load"}


def test_what_is_mounted_is_there() -> None:
    """Nothing has to be edited or made first, and nothing is mounted to be written."""
    for name, told in SERVICES.items():
        for volume in told.get("volumes", []):
            here, _, mode = volume.split(":")
            assert (DIR / here).resolve().exists() and mode == "ro", (name, volume)
        for needed in told.get("depends_on", []):
            assert needed in SERVICES, (name, needed)
    build = SERVICES["gateway-1"]["build"]
    assert (DIR / build["context"] / build["dockerfile"]).exists()
    assert all(re.fullmatch(r"\$\{\w+:-.+}", value) for value in SERVICES["gateway-1"]["environment"].values())


def test_what_is_named_is_a_service() -> None:
    """In the configuration of the gateways, of the balancer, of Prometheus and of Grafana's data source."""
    texts = [(DIR / name).read_text() for name in ("headrace.yaml", "nginx.conf", "prometheus.yml")]
    texts.append((ROOT / "deploy/grafana/provisioning/datasources/headrace.yaml").read_text())
    named = set(re.findall(r"([a-z][a-z0-9-]*):(?:8080|9090|8000|6379)\b", "\n".join(texts)))
    assert named == {"gateway-1", "gateway-2", "backend-1", "backend-2", "valkey", "prometheus"}
    assert named <= SERVICES.keys()


def test_the_gateways_take_their_configuration() -> None:
    """With the key that is told, the model that the backends serve, and limits that both share."""
    settings = parse(
        (DIR / "headrace.yaml").read_text(), environ={"HEADRACE_ADMIN_TOKEN": "t", "HEADRACE_SECRET": "s" * 32}
    )
    assert sha256(KEY.encode()).hexdigest() in {key.sha256 for key in settings.tenants["demo"].keys}
    command = SERVICES["backend-1"]["command"]
    assert command[command.index("--model") + 1] == MODEL in settings.models
    assert str(settings.state.url).startswith("redis://valkey")


def test_the_image_holds_what_it_needs_and_no_more() -> None:
    """Hashed requirements, two stages, a user without a name, and a context without the rest of the repository."""
    text = (ROOT / "deploy/docker/Containerfile").read_text()
    assert text.count("FROM ") == 2 and "USER 10001:10001" in text and "HEALTHCHECK" in text
    installs = re.findall(r"pip install (?!--no-deps dist)(.*?)(?: \\)?$", text, re.MULTILINE)
    assert installs and all("--require-hashes" in each for each in installs)
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == ["headrace"]
    for name in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in name.split():
            assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*" and "!gateway" in ignored and "!tests" not in ignored
    for line in (ROOT / "deploy/docker/requirements-build.txt").read_text().splitlines():
        assert "http" not in line
