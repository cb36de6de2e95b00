"""See what has become of ranks that cannot tell it themselves: those that are gone, or frozen.

SIGTERM does not reach a frozen rank, and torchrun's agent would wait half a minute before it kills.
A rank that is saving what a lost peer had must be left that time.
"""

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from vigpipe.launch.failures import pid_file, record_file

FROZEN_SECONDS = 3.0  # without any work, after which a rank is not expected to end by itself
POLL_SECONDS = 0.02
_EXITING = 0x4  # PF_EXITING of the kernel: its files, hence its sockets, may be closed already


@dataclass
class LostRanks:
    """Ranks that could not tell themselves what has become of them.

    Attributes:
        gone: that were no more when the first of the others told that it had lost a peer.
        frozen: that had to be killed, because they did not end after that.
    """

    gone: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)


def watch(folder: Path, world_size: int, over: threading.Event, lost_ranks: LostRanks) -> None:
    """When one rank has failed, see who is gone, and kill those that neither work nor end.

    Args:
        folder: where ranks leave their process ids and why they failed.
        world_size: number of ranks.
        over: all have ended.
        lost_ranks: is told.
    """
    while not any(folder.glob("failed-rank*.json")):
        if over.wait(POLL_SECONDS):
            return
    running = {rank: _open(folder, rank) for rank in range(world_size)}
    for rank, process in running.items():
        if process is None and not record_file(folder, rank).exists():
            lost_ranks.gone.add(rank)
    left = {rank: process for rank, process in running.items() if process is not None}
    spent = dict.fromkeys(left, 0)
    worked = dict.fromkeys(left, time.monotonic())  # when that last grew
    while left and not over.wait(POLL_SECONDS):
        for rank, process in list(left.items()):
            if _has_ended(process):
                os.close(left.pop(rank))
                continue
            state, ticks = _at_work(folder, rank)
            if ticks > spent[rank] or state == "D":  # waits for a disk
                spent[rank], worked[rank] = ticks, time.monotonic()
            # One that was stopped ("T") will not go on.
            if state == "T" or time.monotonic() - worked[rank] > FROZEN_SECONDS:
                lost_ranks.frozen.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(left.pop(rank))
    for process in left.values():
        os.close(process)


def _open(folder: Path, rank: int) -> int | None:
    """A file descriptor of a rank's process; None if that has ended, or is about to.

    A peer may see closed sockets while another thread of the rank, in a disk for instance, keeps
    the process from its end.
    """
    try:
        pid = int(pid_file(folder, rank).read_text())
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    if _has_ended(process) or _is_exiting(pid):  # and nobody has asked for its exit code yet
        os.close(process)
        return None
    return process


def _has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def _is_exiting(pid: int) -> bool:
    try:
        return bool(int(_stat(pid)[6]) & _EXITING)
    except OSError:  # it has just ended
        return True


def _at_work(folder: Path, rank: int) -> tuple[str, int]:
    """A rank's state as in ps(1), and the processor time it has had, in clock ticks."""
    try:
        values = _stat(int(pid_file(folder, rank).read_text()))
    except OSError:  # it has just ended
        return "", 0
    return values[0], int(values[11]) + int(values[12])


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat tells behind the process's name: state, parent, ... (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
