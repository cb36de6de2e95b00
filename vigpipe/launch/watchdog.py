"""Find ranks that cannot report their own failure because they are gone or frozen.

A frozen rank does not react to SIGTERM, and torchrun's agent would kill it only after half a
minute. A rank that is saving the state it shares with a lost peer must be given time to finish.
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

FROZEN_SECONDS = 3.0  # a rank that has not worked for so long is not expected to end by itself
POLL_SECONDS = 0.02
_EXITING = 0x4  # PF_EXITING of the kernel: files and sockets of the process may be closed already


@dataclass
class LostRanks:
    """Ranks that could not report their own failure.

    Attributes:
        gone: ranks that no longer existed when the first other rank recorded a failure.
        frozen: ranks that had to be killed because they neither worked nor ended after that.
    """

    gone: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)


def watch(folder: Path, world_size: int, has_ended: threading.Event, lost_ranks: LostRanks) -> None:
    """Wait for a rank to fail, find ranks that are gone, and kill those that are frozen.

    Args:
        folder: folder in which ranks leave their process ids and their records of failures.
        world_size: number of ranks.
        has_ended: set by the caller when all ranks have ended; this function then returns.
        lost_ranks: is filled with the ranks that are gone and those that were killed.
    """
    while not any(folder.glob("failed-rank*.json")):
        if has_ended.wait(POLL_SECONDS):
            return
    processes = {rank: _open(folder, rank) for rank in range(world_size)}
    for rank, process in processes.items():
        if process is None and not record_file(folder, rank).exists():
            lost_ranks.gone.add(rank)
    running = {rank: process for rank, process in processes.items() if process is not None}
    spent_ticks = dict.fromkeys(running, 0)
    last_work = dict.fromkeys(running, time.monotonic())  # when spent_ticks last grew
    while running and not has_ended.wait(POLL_SECONDS):
        for rank, process in list(running.items()):
            if _has_ended(process):
                os.close(running.pop(rank))
                continue
            state, ticks = _state_and_ticks(folder, rank)
            if ticks > spent_ticks[rank] or state == "D":  # waits for a disk
                spent_ticks[rank], last_work[rank] = ticks, time.monotonic()
            # A process that was stopped ("T") will not continue.
            if state == "T" or time.monotonic() - last_work[rank] > FROZEN_SECONDS:
                lost_ranks.frozen.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(running.pop(rank))
    for process in running.values():
        os.close(process)


def kill_ranks(folder: Path, world_size: int) -> None:
    """Kill the ranks that still run.

    Args:
        folder: folder in which ranks leave their process ids.
        world_size: number of ranks.
    """
    for rank in range(world_size):
        process = _open(folder, rank)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


def _open(folder: Path, rank: int) -> int | None:
    """Open a file descriptor of a rank's process; None if it has ended or is about to end.

    A peer may see closed sockets while another thread of the rank, one that waits for a disk for
    instance, still keeps the process from ending.
    """
    try:
        pid = int(pid_file(folder, rank).read_text())
        process = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    if _has_ended(process) or _is_exiting(pid):  # its parent has not yet asked for its exit code
        os.close(process)
        return None
    return process


def _has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def _is_exiting(pid: int) -> bool:
    try:
        return bool(int(_stat(pid)[6]) & _EXITING)
    except OSError:  # the process has just ended
        return True


def _state_and_ticks(folder: Path, rank: int) -> tuple[str, int]:
    """Return a rank's state as in ps(1), and the processor time it has used, in clock ticks."""
    try:
        values = _stat(int(pid_file(folder, rank).read_text()))
    except OSError:  # the process has just ended
        return "", 0
    return values[0], int(values[11]) + int(values[12])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the process name: state, parent, ... (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
