"""When a run saves and when it stops: intervals, limits, signals, and clocks that jump."""

import contextlib
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from vigpipe.config.interval import Interval
from vigpipe.errors import INTERRUPTED, SAVED, InputError
from vigpipe.run.stop_and_save import (
    ANSWER,
    ASKED_VARIABLE,
    ASKS_TO_STOP,
    SaveAndStop,
    how_to_go_on,
    parse_stop_before,
    what_is_saved,
)


def test_a_rank_that_does_not_take_every_step_misses_no_checkpoint():
    save_and_stop = SaveAndStop(Interval(steps=4))
    due = [step for step in (3, 4, 5, 9, 17, 12, 20) if save_and_stop.is_save_due(step)]
    assert due == [4, 9, 17, 12, 20]


def test_seconds_are_counted_from_the_last_checkpoint(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    save_and_stop = SaveAndStop(Interval(seconds=20))
    now[0] += 19.9
    assert not save_and_stop.is_save_due(1)
    now[0] += 0.2
    assert save_and_stop.is_save_due(2)
    save_and_stop.saved()
    assert not save_and_stop.is_save_due(3)


def test_a_clock_that_jumps_moves_nothing(monkeypatch):
    save_and_stop = SaveAndStop(Interval(seconds=100), time.monotonic() + 100)
    for jump in (-86400, 86400):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
        assert not save_and_stop.is_save_due(1)
        assert not save_and_stop.is_stop_due()


def test_stopping_before_slurm_s_limit_or_at_a_moment():
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    assert parse_stop_before("10m", env) - time.monotonic() == pytest.approx(3000, abs=2)
    assert parse_stop_before(None, {}) == float("inf")
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 30)}
    stop_at = parse_stop_before("1m", env)  # the time has passed: every start does one step
    assert SaveAndStop(Interval(), stop_at).is_stop_due()
    moment = datetime.fromtimestamp(time.time() + 50).isoformat()
    assert parse_stop_before(moment, {}) - time.monotonic() == pytest.approx(50, abs=2)
    past = datetime.fromtimestamp(time.time() - 50).isoformat()
    with pytest.raises(InputError, match="that was 50 s ago; give a later moment"):
        parse_stop_before(past, {})


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_END_TIME": "soon"}])
def test_a_limit_that_is_not_known_is_told(env):
    with pytest.raises(InputError, match="SLURM_JOB_END_TIME is not set"):
        parse_stop_before("5m", env)
    for text in ("soon", "2026-13-01", "5", ""):
        with pytest.raises(InputError, match="must be a time before the job's limit"):
            parse_stop_before(text, env)


@pytest.mark.parametrize(
    ("number", "code", "why", "told"),
    [
        (signal.SIGTERM, SAVED, "process {pid} got SIGTERM", ""),
        (signal.SIGUSR1, SAVED, "process {pid} got SIGUSR1", ""),
        (signal.SIGINT, INTERRUPTED, "Ctrl-C", f"vigpipe: {ANSWER}\n"),
    ],
)
def test_a_signal_is_a_wish_and_ends_nothing(number, code, why, told, capfd):
    before = signal.getsignal(number)
    save_and_stop = SaveAndStop(Interval())
    with save_and_stop:
        assert not save_and_stop.is_stop_due()
        signal.raise_signal(number)
        signal.raise_signal(number)  # a launcher hands it on
        signal.raise_signal(signal.SIGTERM)  # as a launcher may, at once
        assert save_and_stop.is_stop_due()
        assert (save_and_stop.why, save_and_stop.code) == (why.format(pid=os.getpid()), code)
    save_and_stop._second_signal.thread.join()
    assert capfd.readouterr().err == told
    assert signal.getsignal(number) == before


def test_ctrl_c_that_is_ignored_stays_so():
    """A shell lets its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    save_and_stop = SaveAndStop(Interval())
    try:
        with save_and_stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert not save_and_stop.is_stop_due()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_of_vigpipe_train_says_who_asked_and_goes_on_in_python(tmp_path, monkeypatch):
    monkeypatch.setenv(ASKED_VARIABLE, str(tmp_path / "why"))
    for words, expected in ((None, f"process {os.getpid()} got SIGTERM"), ("on_step", "on_step")):
        if words is not None:
            (tmp_path / "why").write_text(words)
        save_and_stop = SaveAndStop(Interval())
        with save_and_stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert save_and_stop.why == expected
    assert how_to_go_on(Path("a b")) == "go on with vigpipe.train(out='a b', resume='auto', ...)"
    monkeypatch.delenv(ASKED_VARIABLE)
    assert what_is_saved(Path("a b"), "step-1") == (
        "and the newest checkpoint is step-1; go on with --out 'a b' --resume auto"
    )
    assert what_is_saved(Path("a"), None) == "with nothing saved"


def test_the_patience_with_work_that_fails_ends_with_it():
    """Or a rank that was stuck afterwards would never be given up."""
    save_and_stop = SaveAndStop(Interval())
    with contextlib.suppress(RuntimeError), save_and_stop.patient():
        assert save_and_stop._second_signal.is_patient
        raise RuntimeError("Connection closed by peer")
    assert not save_and_stop._second_signal.is_patient


@pytest.mark.parametrize("ends", ["by an exception", "as it should"])
def test_a_rank_that_leaves_is_not_ended_by_its_launcher_before_it_has_said_why(ends, handlers):
    # Launchers send SIGTERM as soon as another rank has ended. It found the default action here,
    # and a slow rank ended without its record.
    save_and_stop = SaveAndStop(Interval(), has_peers=True)
    with contextlib.suppress(RuntimeError), save_and_stop:
        if ends == "by an exception":
            raise RuntimeError("Connection closed by peer")
    os.kill(os.getpid(), signal.SIGTERM)
    assert save_and_stop.why == f"process {os.getpid()} got SIGTERM"


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in ASKS_TO_STOP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
