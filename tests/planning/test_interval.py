"""The interval of a predicted step: as wide as the machine was unsteady."""

import random
from math import log
from typing import Any

import pytest

from tests.planning.profiles import make_profile
from vigpipe.planning.interval import step_interval
from vigpipe.planning.step import Request, predict

ALONE = Request(1, 1, 4, (2,))
PAIR = Request(2, 1, 4, (2,))
STAGES = {1: ((0, 1),), 2: ((0,), (1,))}


def interval_of(request, rounds, slowdown=(1.0, 1.0)) -> tuple[Any, float]:
    """The interval and the step."""
    profile = make_profile([1.0, 1.0], rounds=rounds, slowdown=slowdown)
    proposal = predict(profile, request, STAGES[request.num_ranks], "gpipe", 1, 2)
    return step_interval(profile, request, proposal), proposal.step_seconds


def test_a_steady_machine_leaves_the_error_of_the_simulation():
    (low, high), step = interval_of(ALONE, ((1.0, 1.0),) * 10)
    assert low < step < high
    assert log(high / step) == pytest.approx(1.645 * 0.03, rel=1e-3)
    assert log(step / low) == pytest.approx(1.645 * 0.03, rel=1e-3)


def test_ranks_side_by_side_are_as_unsteady_as_they_were_in_the_rounds():
    """One rank alone was steady; two hindered each other in half of the rounds."""
    rounds = ((1.0, 1.0), (1.0, 1.5)) * 5
    (low, high), step = interval_of(PAIR, rounds, slowdown=(1.0, 1.25))
    assert low < step < high
    assert high / low > 1.3
    (low, high), _ = interval_of(ALONE, rounds, slowdown=(1.0, 1.25))
    assert high / low < 1.11


def test_a_step_that_no_round_had_is_inside_too():
    (low, high), step = interval_of(ALONE, ((2.0, 2.0),) * 10)
    assert low == step < high


def test_of_too_few_rounds_there_is_none():
    assert interval_of(ALONE, ((1.0, 1.0),) * 2)[0] is None


def test_nine_in_ten_runs_lie_inside():
    """Rounds and runs on a machine whose speed varies at random, by 10 %."""
    draw = random.Random(0)
    num_inside, num_runs = 0, 400
    for _ in range(num_runs):
        *rounds, run = [(draw.lognormvariate(0, 0.1),) * 2 for _ in range(11)]
        (low, high), step = interval_of(ALONE, tuple(rounds))
        num_inside += low <= step * run[0] <= high
    assert 0.87 < num_inside / num_runs < 0.96
