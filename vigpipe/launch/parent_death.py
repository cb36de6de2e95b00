"""Let processes end with the one that they work for, and remove its private folder if it is killed.

Python's own means need a process that runs: a stopped one would stay, and a fork server looks only
when it has imported, which takes seconds. The kernel's signal ends both. To import this module does
it for the fork server and the child of `vigpipe.train`.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

from vigpipe.launch.fork_server import FOLDER_OF_STARTER, STARTER
from vigpipe.launch.watchdog import has_ended

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); a fork does not inherit it
_LOOK_SECONDS = 0.05
_REMOVAL_SECONDS = 5.0  # ranks that are being killed may still write for a moment


_server: int | None = None  # the fork server that has imported this, or that this is a fork of


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process, stopped or not, when its parent ends (Linux only).

    More exactly, when the thread ends that has made this process. If the parent has ended before
    this call, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent and has_ended(parent):
            os._exit(1)


def die_with_fork_server() -> None:
    """Let the kernel kill this fork of the server when that ends, and so when its starter does."""
    if _server is not None:
        die_with_parent(_server)


def _start_cleaner(starter: int, folder: str) -> None:
    """Start a process that removes the folder once this process and the starter have ended."""
    try:
        this, other = os.pidfd_open(os.getpid()), os.pidfd_open(starter)
    except ProcessLookupError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    if os.fork() == 0:
        try:
            _clean(this, other, folder)
        finally:
            os._exit(0)
    os.close(this)
    os.close(other)


def _clean(parent: int, starter: int, folder: str) -> None:
    os.setsid()  # what stops or kills the group of the starter, or ends a whole job, is not for it
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for file in map(int, os.listdir("/proc/self/fd")):  # who waits for their ends waits for others
        if file > 2 and file not in (parent, starter):
            with contextlib.suppress(OSError):  # that of the list
                os.close(file)
    select.select([parent], [], [])
    while os.path.exists(folder) and not select.select([starter], [], [], _LOOK_SECONDS)[0]:
        pass
    until = time.monotonic() + _REMOVAL_SECONDS
    while os.path.exists(folder) and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


if sys.platform == "linux" and STARTER in os.environ:
    _server = os.getpid()
    _starter = int(os.environ.pop(STARTER))
    if FOLDER_OF_STARTER in os.environ:
        with contextlib.suppress(OSError):  # the folder may stay, where a kernel has no such files
            _start_cleaner(_starter, os.environ.pop(FOLDER_OF_STARTER))
    die_with_parent(_starter)
