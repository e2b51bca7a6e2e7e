"""What a newcomer reads is true: configurations load, commands exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gateway import cli, config
from tests.test_floors import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[str]:
    """The code blocks of the README in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_its_configuration_serves_in_ten_lines() -> None:
    """As it stands there."""
    (text,) = blocks("yaml")
    assert len(text.splitlines()) == 10
    assert config.parse(text).models["llama-3-8b"].pool == "llama"


def test_its_commands_are_understood() -> None:
    """Each with its options; nothing is run."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("headrace ")]
    assert len(commands) == 6
    for words in commands:
        group: click.Command = cli.main
        while isinstance(group, click.Group):
            group = group.commands[words.pop(0)]
        group.make_context(group.name, words)


def test_its_targets_are_made() -> None:
    """`make demo` and `make test` come first."""
    targets = re.findall(r"`?make ([\w-]+)", README)
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    assert set(targets) <= set(made)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Those within the repository."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_decisions_are_numbered() -> None:
    """From 0001 on, without a gap, each with its parts."""
    pages = sorted((ROOT / "docs" / "decisions").iterdir())
    assert [page.name[:5] for page in pages] == [f"{number:04}-" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text()
        assert text.startswith("# ")
        assert all(f"**{part}" in text for part in ("Choices.", "Decision.", "Why", "What it costs.")), page.name
