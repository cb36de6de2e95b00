"""Steps are timed in turns, so that a moment of the machine is in the times of all trials."""

import pytest

from tests.profiling.quick import CPU, make_run
from vigpipe.profiling import seconds
from vigpipe.profiling.seconds import NUM_TURNS, TimedSteps
from vigpipe.profiling.trial import NUM_WARMUP, make_trial


@pytest.fixture
def timed(monkeypatch):
    """Make trials of micro-batches of some sizes."""
    monkeypatch.setattr(seconds, "ENOUGH_SECONDS", 0.0)
    run = make_run()
    return lambda sizes: [TimedSteps(make_trial(run, s, CPU)) for s in run.job.trials(sizes, 2)]


def steps_of(trial):
    return [row.step for row in trial.rows() if row.name == "step"]


def test_a_trial_that_has_taken_very_long_gets_no_more_turns(timed, monkeypatch):
    monkeypatch.setattr(seconds, "MAX_SECONDS", 0.0)
    (trial,) = timed([2])
    for _ in range(NUM_TURNS):
        trial.take_turn()
    assert steps_of(trial) == [NUM_WARMUP]


def test_short_steps_fill_their_share_of_the_time(timed, monkeypatch):
    monkeypatch.setattr(seconds, "ENOUGH_SECONDS", 1e6)
    monkeypatch.setattr(seconds, "MAX_STEPS", 2 * NUM_TURNS)
    (trial,) = timed([2])
    trial.take_turn()
    trial.take_turn()
    assert len(steps_of(trial)) == 4
