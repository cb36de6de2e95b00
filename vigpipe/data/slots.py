"""Memory that a rank shares with the processes that read images for it, in slots of equal size."""

import math
import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from vigpipe.errors import InputError


class Slots:
    """Slots of shared memory; whoever gets a pickled copy sees the same bytes.

    The memory is all there from the beginning: a worker that writes into it cannot find that there
    is none left. It does not count against the size of /dev/shm, which containers keep small, and
    is gone with the last process that uses it. A uint8 tensor of the shape fills a slot. More than
    the host's memory is an InputError.
    """

    def __init__(self, num_slots: int, shape: tuple[int, ...]) -> None:
        self._shape = (num_slots, *shape)
        self._num_bytes = math.prod(self._shape)
        all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self._num_bytes > all_bytes:  # The system would try, and run out of memory.
            raise InputError(
                f"--workers: they would share {self._num_bytes / 2**20:,.0f} MiB with their rank, "
                f"and this host has {all_bytes / 2**20:,.0f} MiB; choose fewer workers, or a "
                "smaller --batch-size"
            )
        self._file = _make_file()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, self._num_bytes)
        else:  # macOS
            os.ftruncate(self._file, self._num_bytes)
        self._map()

    def __getitem__(self, slot: int) -> Tensor:
        return self._slots[slot]

    def _map(self) -> None:
        memory = mmap.mmap(self._file, self._num_bytes)
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(self._shape)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the file; works only while a process is being started."""
        return {**vars(self), "_slots": None, "_file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _file=state["_file"].detach())
        self._map()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _make_file() -> int:
    """Return the descriptor of a new file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vigpipe-images", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
