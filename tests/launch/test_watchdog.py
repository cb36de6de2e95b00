"""Which ranks are frozen, that neither work nor end, and which have ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.world import wait_until
from vigpipe.launch.failures import pid_file
from vigpipe.launch.watchdog import FROZEN_SECONDS, Watchdog, ended

WORK = "while True: pass"
SLEEP = "import time; time.sleep(60)"
# Its main thread ends at once (SYS_exit of x86-64 and of ARM), the process after a minute.
EXITING = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)
"""


def test_a_rank_that_still_saves_is_left_its_time_and_a_frozen_one_is_not():
    ranks = [subprocess.Popen([sys.executable, "-c", work]) for work in (WORK, SLEEP, SLEEP)]
    try:
        os.kill(ranks[2].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, ranks[2].pid, os.WSTOPPED)
        pids = {number: rank.pid for number, rank in enumerate(ranks)}
        watchdog, began = Watchdog(), time.monotonic()
        assert watchdog.find_frozen(pids) == {2}  # at once
        while (frozen := watchdog.find_frozen(pids)) == {2}:
            time.sleep(0.02)
        assert frozen == {1, 2}
        assert time.monotonic() - began > FROZEN_SECONDS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_rank_that_is_about_to_end_has_ended(tmp_path):
    """A peer saw its sockets closed before it could be waited for."""
    with subprocess.Popen([sys.executable, "-c", EXITING], stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()
            stat = Path(f"/proc/{rank.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it ends")
            pid_file(tmp_path, 0).write_text(str(rank.pid))
            assert ended(tmp_path, [0])
            assert rank.poll() is None
            pid_file(tmp_path, 1).write_text(str(os.getpid()))
            assert not ended(tmp_path, [1, 2])  # one works, the other has not begun
            gone = subprocess.Popen(["true"])
            gone.wait()
            pid_file(tmp_path, 3).write_text(str(gone.pid))
            assert ended(tmp_path, [1, 3])
        finally:
            rank.kill()
