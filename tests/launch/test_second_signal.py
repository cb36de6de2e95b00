"""A second signal ends a process whatever it does, and one that is not stuck is left alone."""

import os
import signal
import sys
import time

import pytest

from tests.world import start_command, wait_until
from vigpipe.launch import second_signal
from vigpipe.launch.second_signal import SecondSignal, left_to_handlers

# Locking a mutex twice waits in C for ever, and no signal interrupts it; Python code goes round and
# takes no notice of handlers or KeyboardInterrupt.
CODE = """
import ctypes, signal, sys, time
from pathlib import Path
from vigpipe.launch import second_signal
from vigpipe.launch.second_signal import SecondSignal

where, patience, done = sys.argv[1:]
second_signal.SAME_SECONDS = 0.0
signal.signal(signal.SIGTERM, lambda *_: Path(done, "handled").touch())
with SecondSignal([signal.SIGTERM, signal.SIGINT], float(patience)):
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    Path(done, "stuck").touch()
    while True:
        try:
            if where == "C":
                libc.pthread_mutex_lock(mutex)
            time.sleep(0.01)
        except KeyboardInterrupt:
            Path(done, "handled").touch()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("where", "number", "code"), [("C", signal.SIGTERM, 143), ("Python", signal.SIGINT, 130)]
)
def test_a_second_signal_ends_what_is_stuck(where, number, code, tmp_path):
    line = [sys.executable, "-c", CODE, where, "inf", str(tmp_path)]
    with start_command(line) as command:
        wait_until((tmp_path / "stuck").exists, "it is stuck")
        os.kill(command.popen.pid, number)
        if where == "Python":
            wait_until((tmp_path / "handled").exists, "the first is handled, and in vain")
        else:
            wait_until(lambda: is_read(command.popen.pid, number), "the first is no longer pending")
        os.kill(command.popen.pid, number)
        done = command.wait()
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "handled").exists() == (where == "Python")


def is_read(pid, number):
    """Whether a signal is not pending: two that are pending at once are one."""
    with open(f"/proc/{pid}/status") as file:
        (mask,) = [row.split()[1] for row in file if row.startswith("ShdPnd")]
    return not int(mask, 16) >> (number - 1) & 1


@pytest.mark.multiprocess
def test_one_signal_and_no_step_for_as_long_as_the_timeout_end_it_too(tmp_path):
    with start_command([sys.executable, "-c", CODE, "C", "0.5", str(tmp_path)]) as command:
        wait_until((tmp_path / "stuck").exists, "it is stuck")
        os.kill(command.popen.pid, signal.SIGTERM)
        done = command.wait()
    assert done.returncode == 143
    pid = command.popen.pid
    assert done.stderr == (
        f"vigpipe: process {pid} got SIGTERM, and no step has ended for 0.5 s: it was ended\n"
    )


@pytest.fixture
def ends(monkeypatch):
    """What would have ended this process."""
    seen = []
    monkeypatch.setattr(second_signal, "_end", lambda *end: seen.append(end))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_what_a_launcher_hands_on_is_the_same_signal(ends, monkeypatch):
    for seconds, expected in ((1e6, []), (-1.0, [(signal.SIGTERM, "")])):
        monkeypatch.setattr(second_signal, "SAME_SECONDS", seconds)
        with SecondSignal([signal.SIGTERM]) as second:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        second.thread.join()
        assert ends == expected


def test_the_first_ctrl_c_is_answered_and_the_second_has_the_last_words(ends, monkeypatch, capfd):
    monkeypatch.setattr(second_signal, "SAME_SECONDS", -1.0)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    with SecondSignal([signal.SIGINT], answer="it stops") as second:
        second.last_words = lambda: "it has stopped"
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    second.thread.join()
    assert capfd.readouterr().err == "vigpipe: it stops\n"
    assert ends == [(signal.SIGINT, "it has stopped")]


def test_a_process_that_goes_on_or_must_be_waited_for_is_left_alone(ends):
    with SecondSignal([signal.SIGTERM], 0.2) as second:
        second.is_patient = True
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)  # longer than its patience
        assert ends == []
        second.went_on()
        second.is_patient = False
        wait_until(lambda: ends, "its patience ends")
    second.thread.join()
    number, told = ends[0]
    assert number == signal.SIGTERM
    assert told.endswith(" got SIGTERM, and no step has ended for 0.2 s: it was ended")


def test_handlers_that_have_others_to_end_decide_themselves(ends, monkeypatch):
    monkeypatch.setattr(second_signal, "SAME_SECONDS", -1.0)
    with SecondSignal([signal.SIGTERM]) as second:
        with left_to_handlers():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    second.thread.join()
    assert ends == []
