"""Measure what work costs: its duration, and the CPU time of this process and of its workers.

On a machine that others use too, the CPU time says more than the duration.
"""

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vigpipe.errors import InputError
from vigpipe.launch.device import synchronize


@dataclass(frozen=True)
class Effort:
    """What a piece of work has cost."""

    seconds: float  # duration
    rank_cpu_seconds: float  # CPU time of this process
    worker_cpu_seconds: float  # CPU time of all processes that it has started

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all processes."""
        return self.rank_cpu_seconds + self.worker_cpu_seconds

    @property
    def busy_cores(self) -> float:
        """Number of cores that were busy with the work on average."""
        return self.cpu_seconds / self.seconds


def measure(work: Callable[[], object], device: torch.device) -> Effort:
    """Do work, and return what it has cost until the device has done it too.

    Args:
        work: leaves nothing behind that its workers still do.
        device: that the work uses.

    Raises:
        InputError: this system does not tell the CPU time of other processes.
    """
    synchronize(device)
    workers = _worker_cpu_seconds()
    rank, start = time.process_time(), time.perf_counter()
    work()
    synchronize(device)
    seconds, rank = time.perf_counter() - start, time.process_time() - rank
    return Effort(seconds, rank, _worker_cpu_seconds() - workers)


def _worker_cpu_seconds() -> float:
    processes = [process.pid for process in multiprocessing.active_children()]
    return sum(_cpu_seconds(pid) for pid in processes if pid is not None)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far; clock_getcpuclockid(3)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "clock_getcpuclockid"):
        raise InputError("feed: needs the CPU time of other processes, which only Linux tells")
    clock = ctypes.c_int()
    error = library.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise RuntimeError(f"process {pid} has no clock (error {error}); has it ended?")
    return time.clock_gettime(clock.value)
