"""When a run saves and when it stops: intervals, limits, signals, and clocks that jump."""

import contextlib
import os
import signal
import time
from datetime import datetime

import pytest

from vigpipe.errors import InputError
from vigpipe.run.stop_and_save import (
    ASKS_TO_STOP,
    CheckpointInterval,
    SaveAndStop,
    parse_checkpoint_interval,
    parse_duration,
    parse_stop_before,
)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("50", CheckpointInterval(steps=50)),
        (7, CheckpointInterval(steps=7)),
        ("10m", CheckpointInterval(seconds=600)),
        ("1.5h", CheckpointInterval(seconds=5400)),
        ("90s", CheckpointInterval(seconds=90)),
        ("1d", CheckpointInterval(seconds=86400)),
        ("never", CheckpointInterval()),
    ],
)
def test_intervals(text, interval):
    assert parse_checkpoint_interval(text) == interval


@pytest.mark.parametrize(
    "text", ["0", "-5", "5 m", "m", "", "nan", "1e9", "0s", "inf", "10000000000"]
)
def test_no_intervals(text):
    with pytest.raises(
        InputError, match="must be a number of steps such as 50, a time such as 10m"
    ):
        parse_checkpoint_interval(text)


def test_steps_are_counted_from_the_start_of_the_run_and_its_end_counts():
    save_and_stop = SaveAndStop(CheckpointInterval(steps=4), 10)
    assert [step for step in range(1, 11) if save_and_stop.is_save_due(step)] == [4, 8, 10]


def test_seconds_are_counted_from_the_last_checkpoint(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    save_and_stop = SaveAndStop(CheckpointInterval(seconds=20), 100)
    now[0] += 19.9
    assert not save_and_stop.is_save_due(1)
    now[0] += 0.2
    assert save_and_stop.is_save_due(2)
    save_and_stop.saved()
    assert not save_and_stop.is_save_due(3)


def test_never_saves_the_last_step_only():
    save_and_stop = SaveAndStop(CheckpointInterval(), 10)
    assert [step for step in range(1, 11) if save_and_stop.is_save_due(step)] == [10]


def test_a_clock_that_jumps_moves_nothing(monkeypatch):
    save_and_stop = SaveAndStop(CheckpointInterval(seconds=100), 100, time.monotonic() + 100)
    for jump in (-86400, 86400):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
        assert not save_and_stop.is_save_due(1)
        assert not save_and_stop.is_stop_due()


def test_stopping_before_slurm_s_limit():
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    assert parse_stop_before("10m", env) - time.monotonic() == pytest.approx(3000, abs=2)
    assert parse_stop_before(None, {}) == float("inf")
    assert SaveAndStop(CheckpointInterval(), 1, time.monotonic() - 1).is_stop_due()
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 30)}
    stop_at = parse_stop_before("1m", env)  # the time has passed: every start does one step
    assert SaveAndStop(CheckpointInterval(), 1, stop_at).is_stop_due()
    past = datetime.fromtimestamp(time.time() - 50).isoformat()
    with pytest.raises(InputError, match="that was 50 s ago; give a later moment"):
        parse_stop_before(past, {})


def test_stopping_at_a_moment():
    moment = datetime.fromtimestamp(time.time() + 50).isoformat()
    assert parse_stop_before(moment, {}) - time.monotonic() == pytest.approx(50, abs=2)


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_END_TIME": "soon"}])
def test_a_limit_that_is_not_known_is_told(env):
    with pytest.raises(InputError, match="SLURM_JOB_END_TIME is not set"):
        parse_stop_before("5m", env)
    for text in ("soon", "2026-13-01", "5", ""):
        with pytest.raises(InputError, match="must be a time before the job's limit"):
            parse_stop_before(text, env)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_wish_and_ends_nothing(number):
    before = signal.getsignal(number)
    save_and_stop = SaveAndStop(CheckpointInterval(), 10)
    with save_and_stop:
        assert not save_and_stop.is_stop_due()
        os.kill(os.getpid(), number)
        assert save_and_stop.is_stop_due()
        assert save_and_stop.why == f"process {os.getpid()} got {number.name}"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("ends", ["by an exception", "to say that it has stopped"])
def test_a_rank_that_leaves_is_not_ended_by_its_launcher_before_it_has_said_why(ends, handlers):
    # Launchers send SIGTERM as soon as another rank has ended. It found the default action here,
    # and a slow rank ended without its record.
    save_and_stop = SaveAndStop(CheckpointInterval(), 10, has_peers=True)
    with contextlib.suppress(RuntimeError), save_and_stop:
        if ends == "by an exception":
            raise RuntimeError("Connection closed by peer")
        save_and_stop.leaves = True
    os.kill(os.getpid(), signal.SIGTERM)
    assert save_and_stop.why == f"process {os.getpid()} got SIGTERM"


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in ASKS_TO_STOP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_durations():
    assert parse_duration("2h") == 7200
    assert parse_duration("2") == 0
