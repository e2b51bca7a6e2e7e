"""What the evaluation must reach: goodputs of a preliminary simulation of the rules, with another model of the engines.

Means of five seeds, by experiment and row, in the order of the points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# The two simulations differ in how engines admit and preempt: so far below a goal is accepted.
ACCEPTED = 0.015

GOALS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "main": {
        "headrace, exact knowledge": (0.995, 0.974, 0.936, 0.988, 0.945, 0.913, 1.0, 0.987, 0.917, 0.796),
        "headrace, all realism": (0.994, 0.956, 0.903, 0.992, 0.952, 0.901, 1.0, 0.987, 0.915, 0.798),
        "headrace, all realism, 5 tenants": (0.994, 0.942, 0.849, 0.991, 0.931, 0.855, 1.0, 0.987, 0.891, 0.762),
        "headrace, all realism, 2 gateways 5 ms": (0.993, 0.941, 0.872, 0.979, 0.888, 0.844, 1.0, 0.987, 0.914, 0.795),
        "headrace, all realism, 2 gateways 100 ms": (0.981, 0.921, 0.85, 0.959, 0.883, 0.831, 1.0, 0.984, 0.913, 0.795),
    }
}
