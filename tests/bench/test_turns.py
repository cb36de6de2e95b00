"""Ratios of ways to run a model, and when they are none."""

import pytest

from vigpipe.bench.turns import best_reference, ratio
from vigpipe.bench.way import Way

EAGER = Way("reference", False, "float32")
COMPILED = Way("reference", True, "float32", channels_last=True)
OURS = Way("ours", False, "float32")


def test_the_best_reference_has_the_least_median_and_is_never_ours():
    seconds = {EAGER: [2.0, 2.0, 0.5], COMPILED: [1.0, 1.1, 9.0], OURS: [0.1, 0.1, 0.1]}
    assert best_reference(seconds) == COMPILED
    assert best_reference({OURS: [0.1]}) is None


def test_a_ratio_is_taken_turn_by_turn():
    found = ratio({EAGER: [2.0, 4.0, 6.0], OURS: [1.0, 2.0, 2.0]}, EAGER, OURS)
    assert (found.median, found.least, found.most) == (2.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ([1.0, 1.0, 1.1, 0.9, 1.0], "2.00× (1.82 – 2.22)"),
        ([1.0, 2.0, 1.0, 0.5, 2.0], "not measurable here (1.00 – 4.00)"),
    ],
)
def test_turns_that_disagree_are_no_measurement(ours, text):
    assert str(ratio({EAGER: [2.0] * 5, OURS: ours}, EAGER, OURS)) == text


def test_a_way_names_all_its_options():
    assert str(COMPILED) == "reference, compiled, channels last, float32"
    frozen = Way("ours", True, "bfloat16", frozen=True, autotuned=True)
    assert str(frozen) == "ours, compiled, max-autotune, frozen, bfloat16"
