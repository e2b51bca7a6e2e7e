"""What is learned of answers follows them, wherever it began."""

from __future__ import annotations

import pytest

from policies.estimate import OutputLengths


@pytest.mark.parametrize("first", [0, 1, 100_000])
def test_a_first_answer_unlike_the_others_is_forgotten(first: int) -> None:
    """Empty or endless: nine in ten of those that follow are not longer than what is set aside for one."""
    lengths = OutputLengths()
    lengths.learn("t", "m", first)
    for number in range(3000):
        lengths.learn("t", "m", 1000 + number % 10)
    assert 900 <= lengths.high("t", "m") <= 1300
    assert 990 <= lengths.expected("t", "m") <= 1020
