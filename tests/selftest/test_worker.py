"""Work in another process: its results, its errors, and its end."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.world import wait_until
from vigpipe.errors import InputError
from vigpipe.selftest.worker import OutOfTime, Worker, WorkerError

pytestmark = pytest.mark.heavy


class Counter:
    """Counts from a beginning, and can fail in many ways."""

    def __init__(self, begin):
        self.value = begin

    def add(self, number):
        self.value += number
        return self.value

    def fail(self, error):
        raise error

    def die(self):
        print("the last word", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def start_a_child(self):
        return subprocess.Popen(["sleep", "1000"]).pid

    def sleep(self):
        time.sleep(1000)


def test_an_object_lives_in_its_process_and_survives_errors():
    with Worker(Counter, 5) as worker:
        assert worker.ask("add", 2, seconds=60) == 7
        with pytest.raises(WorkerError, match="ValueError: no such thing"):
            worker.ask("fail", ValueError("no such thing"), seconds=60)
        with pytest.raises(InputError, match=r"^--device x$"):
            worker.ask("fail", InputError("--device x"), seconds=60)
        assert worker.ask("add", 1, seconds=60) == 8
        assert not worker.has_ended
        with pytest.raises(WorkerError, match="ended with SIGKILL: the last word"):
            worker.ask("die", seconds=60)
        assert worker.has_ended


def test_what_takes_too_long_is_killed_with_its_children():
    with Worker(Counter, 0) as worker:
        child = worker.ask("start_a_child", seconds=60)
        with pytest.raises(OutOfTime):
            worker.ask("sleep", seconds=0.01)
    wait_until(lambda: not is_running(child), "the child of the worker is gone")


def is_running(pid):
    """Whether a process runs; one that has ended may wait for a parent that asks how."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
