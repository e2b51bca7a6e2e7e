"""The configuration that a command is given: read, or told why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import click

from gateway import config
from gateway.problem import document


def given(path: Path, as_json: bool = False) -> config.Config:
    """The configuration in a file. If it cannot serve, the command ends with code 2 and every problem: on stderr, or
    as JSON on stdout."""
    try:
        return config.load(path)
    except config.ConfigError as error:
        unfit(error, as_json)


def unfit(error: config.ConfigError, as_json: bool = False) -> NoReturn:
    """The end of a command whose file is bad."""
    if as_json:
        click.echo(json.dumps({"problems": [document(problem) for problem in error.problems]}))
    else:
        click.echo(str(error), err=True)
    sys.exit(2)
