"""Which ranks are killed when another one has failed: only those that neither work nor end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.world import wait_until
from vigpipe.launch.failures import pid_file, record_file
from vigpipe.launch.watchdog import FROZEN_SECONDS, LostRanks, watch

WORK = f"import time; end = time.time() + {FROZEN_SECONDS + 2}\nwhile time.time() < end: pass"
SLEEP = "import time; time.sleep(60)"
# Its main thread ends at once (SYS_exit of x86-64 and of ARM), the process after a minute.
EXITING = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)
"""


def test_a_rank_that_still_saves_is_left_its_time_and_a_frozen_one_is_not(tmp_path):
    began = time.monotonic()
    ranks = [subprocess.Popen([sys.executable, "-c", work]) for work in (WORK, SLEEP, SLEEP)]
    gone = subprocess.Popen(["true"])
    gone.wait()
    for number, rank in enumerate([*ranks, gone]):
        pid_file(tmp_path, number).write_text(str(rank.pid))
    os.kill(ranks[2].pid, signal.SIGSTOP)
    record_file(tmp_path, 4).touch()  # a fifth one has told that it lost a peer
    lost_ranks, over = LostRanks(), threading.Event()
    warden = threading.Thread(target=watch, args=(tmp_path, 5, over, lost_ranks))
    warden.start()
    try:
        assert ranks[2].wait(20) == -signal.SIGKILL
        stopped = time.monotonic()
        assert ranks[1].wait(20) == -signal.SIGKILL
        assert time.monotonic() - began > FROZEN_SECONDS > stopped - began
        assert ranks[0].wait(20) == 0
        warden.join(20)
        assert not warden.is_alive()
    finally:
        over.set()
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (lost_ranks.gone, lost_ranks.frozen) == ({3}, {1, 2})


def test_a_rank_that_is_about_to_end_is_gone(tmp_path):
    """A peer saw its sockets closed before it could be waited for."""
    with subprocess.Popen([sys.executable, "-c", EXITING], stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()
            stat = Path(f"/proc/{rank.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it ends")
            pid_file(tmp_path, 0).write_text(str(rank.pid))
            record_file(tmp_path, 1).touch()
            lost_ranks = LostRanks()
            watch(tmp_path, 1, threading.Event(), lost_ranks)
            assert rank.poll() is None
        finally:
            rank.kill()
    assert (lost_ranks.gone, lost_ranks.frozen) == ({0}, set())
