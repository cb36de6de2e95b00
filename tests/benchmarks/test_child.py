"""A command in a process of its own ends with us."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from benchmarks.child import run_child
from tests.world import run_command, start_command, wait_until
from vigpipe.launch.child import stoppable
from vigpipe.launch.signals import Stopped


def test_a_signal_is_128_and_its_number():
    assert run_child(["sh", "-c", "kill -9 $$"]) == 128 + signal.SIGKILL


def test_its_stdout_is_dropped_and_its_stderr_kept(capfd):
    run_child(["sh", "-c", "echo out; echo cause >&2"])
    assert capfd.readouterr() == ("", "cause\n")


def test_what_it_leaves_behind_is_ended():
    code = "from benchmarks.child import run_child; run_child(['sh', '-c', 'sleep 60 & exit 0'])"
    assert run_command([sys.executable, "-c", code]).returncode == 0  # looks for what is left


CODE = """
import sys
import threading
from benchmarks.child import run_child
from vigpipe.launch.child import stoppable
from vigpipe.launch.signals import Stopped
try:
    with stoppable():
        run_child(["sh", "-c", "trap 'echo ending >&2; exit 0' TERM; sleep 60 & wait"])
except Stopped as stopped:
    sys.exit(128 + stopped.signum)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_us_lets_it_end_in_order(number):
    with start_command([sys.executable, "-c", CODE]) as command:
        wait_until(lambda: len(command.processes()) == 3, "python, sh and sleep run")
        command.popen.send_signal(number)
        done = command.wait(20)
    assert done.returncode == 128 + number
    assert done.stderr == "ending\n"


def test_a_signal_while_it_starts_is_not_lost(monkeypatch):
    # Symptom: on a busy machine a signal came when the child ran already but Popen had not yet
    # returned, and the child stayed behind.
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(Stopped), stoppable():
        run_child(["sleep", "60"])
    assert started[0].returncode == -signal.SIGTERM


def test_a_thread_may_start_a_child_although_it_handles_no_signals():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_child(["sh", "-c", "exit 3"])))
    thread.start()
    thread.join()
    assert codes == [3]
