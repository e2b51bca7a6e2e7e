"""An event loop that comes late sheds the work that nobody watches."""

from __future__ import annotations

import pytest

from gateway.vitals import RELIEF_S, STRAIN_S, Vitals


@pytest.mark.parametrize(
    ("beats", "told"), [([STRAIN_S * 2], []), ([60.0], []), ([STRAIN_S * 2] * 5, [True]), ([60.0] * 2, [True])]
)
def test_one_late_beat_is_no_strain(beats: list[float], told: list[bool]) -> None:
    """However late: a machine that was stopped goes on as before. Several in a row are."""
    vitals, heard = Vitals(lambda: 0.0, lambda: 0.0), []
    vitals.on_strain = heard.append
    for late_s in beats:
        vitals._weigh(late_s)
    assert heard == told


def test_relief_comes_later_than_the_strain_went() -> None:
    """So that it does not go to and fro."""
    vitals, heard = Vitals(lambda: 0.0, lambda: 0.0), []
    vitals.on_strain = heard.append
    for late_s in [STRAIN_S * 3] * 5 + [(STRAIN_S + RELIEF_S) / 2] * 30 + [0.0] * 10:
        vitals._weigh(late_s)
    assert heard == [True, False]
