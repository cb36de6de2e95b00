"""Steps are timed in turns, so that a moment of the machine is in the times of all trials."""

import pytest

from tests.profiling.quick import CPU, make_run
from vigpipe.profiling import seconds
from vigpipe.profiling.seconds import NUM_TURNS, TimedSteps
from vigpipe.profiling.trial import NUM_WARMUP, make_trial, trial_steps


@pytest.fixture
def timed(monkeypatch):
    monkeypatch.setattr(seconds, "ENOUGH_SECONDS", 0.0)
    run = make_run()
    return [TimedSteps(make_trial(run, step, CPU)) for step in trial_steps(run, [2, 4])]


def test_every_turn_adds_a_step_to_every_trial(timed):
    for _ in range(NUM_TURNS):
        for of_trial in timed:
            of_trial.take_turn()
    wanted = list(range(NUM_WARMUP, NUM_WARMUP + NUM_TURNS))
    for of_trial in timed:
        assert [row.step for row in of_trial.rows() if row.name == "step"] == wanted


def test_a_trial_that_has_taken_very_long_gets_no_more_turns(timed, monkeypatch):
    monkeypatch.setattr(seconds, "MAX_SECONDS", 0.0)
    for _ in range(NUM_TURNS):
        timed[0].take_turn()
    assert [row.step for row in timed[0].rows() if row.name == "step"] == [NUM_WARMUP]


def test_short_steps_fill_their_share_of_the_time(timed, monkeypatch):
    monkeypatch.setattr(seconds, "ENOUGH_SECONDS", 1e6)
    monkeypatch.setattr(seconds, "MAX_STEPS", 2 * NUM_TURNS)
    timed[0].take_turn()
    timed[0].take_turn()
    assert len([row for row in timed[0].rows() if row.name == "step"]) == 4
