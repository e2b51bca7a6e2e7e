"""Faults under load, in short: `make chaos` is the long form."""

from __future__ import annotations

import pytest

from loadtests.chaos import chaos, single, soak
from loadtests.faultrelay import Weather

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


async def test_a_storm_of_faults_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty seconds of kills, stops, resets and lies: nobody is lied to, everything is given back."""
    assert await chaos(20.0, 7, 12.0) == 0, capsys.readouterr().out


@pytest.mark.parametrize("weather", [Weather.KILL, Weather.STOP, Weather.GARBAGE])
async def test_nobody_sees_one_backend_of_four_fail(weather: Weather, capsys: pytest.CaptureFixture[str]) -> None:
    """Before his first byte."""
    assert await single(weather, 6.0, 1, 12.0) == 0
    told = capsys.readouterr().out
    assert ", 0 failed before the first byte" in told, told


async def test_a_quiet_load_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """All are served; memory is judged by the long run only."""
    await soak(8.0, 3, 12.0)
    told = capsys.readouterr().out
    assert ", 0 of them failed" in told and "violations: 0" in told, told
