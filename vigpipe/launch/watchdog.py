"""Find ranks that cannot report their own failure because they are gone or frozen.

A rank that is saving the state it shares with a lost peer must be given time to finish.
"""

import os
import select
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vigpipe.launch.failures import pid_file

FROZEN_SECONDS = 3.0  # a rank that has not worked for so long is not expected to end by itself
_EXITING = 0x4  # PF_EXITING of the kernel: files and sockets of the process may be closed already


class Watchdog:
    """Finds ranks that neither work nor end; look often, from when they were asked to end."""

    def __init__(self) -> None:
        self._spent_ticks: dict[int, int] = {}
        self._last_work: dict[int, float] = {}  # when the spent ticks of a rank last grew
        self._looked = 0.0

    def find_frozen(self, pids: Mapping[int, int]) -> set[int]:
        """Return the ranks that are stopped, or have not worked for FROZEN_SECONDS."""
        frozen: set[int] = set()
        now = time.monotonic()
        if now - self._looked > FROZEN_SECONDS / 3:  # nothing ran here meanwhile, perhaps no rank
            self._last_work = dict.fromkeys(pids, now)
        self._looked = now
        for rank, pid in pids.items():
            state, ticks = _state_and_ticks(pid)
            if ticks > self._spent_ticks.get(rank, -1) or state == "D":  # waits for a disk
                self._spent_ticks[rank], self._last_work[rank] = ticks, now
            # A process that was stopped ("T") will not continue.
            if state == "T" or now - self._last_work[rank] > FROZEN_SECONDS:
                frozen.add(rank)
        return frozen


def ended(folder: Path, ranks: Sequence[int]) -> bool:
    """Whether one of the ranks that had begun to run, by their files, has ended or is about to."""
    paths = [pid_file(folder, rank) for rank in ranks]
    return any(path.exists() and has_ended(int(path.read_text())) for path in paths)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or is about to."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:  # its parent may not yet have asked for its exit code
        return bool(select.select([process], [], [], 0)[0]) or _is_exiting(pid)
    finally:
        os.close(process)


def _is_exiting(pid: int) -> bool:
    try:
        return bool(int(_stat(pid)[6]) & _EXITING)
    except OSError:  # the process has just ended
        return True


def _state_and_ticks(pid: int) -> tuple[str, int]:
    """Return a process's state as in ps(1), and the processor time it has used, in clock ticks."""
    try:
        values = _stat(pid)
    except OSError:  # the process has just ended
        return "", 0
    return values[0], int(values[11]) + int(values[12])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the process name: state, parent, ... (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
