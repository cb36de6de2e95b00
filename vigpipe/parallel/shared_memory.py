"""Memory that the ranks of one machine write into, instead of sending through sockets.

A rank makes a tensor in memory of its own that has a file descriptor (memfd_create), and tells the
others its number. They open /proc/PID/fd/NUMBER, map the same pages, and write there what they have
for it. Nothing has a name in a file system, so nothing is left behind however a process ends.
Memory whose tensor is gone is used again.
"""

import mmap
import os
import weakref
from ctypes import c_char
from typing import Any, NamedTuple

import torch
from torch import Tensor

_GRAIN = 1 << 16  # bytes; the sizes of segments are multiples of this
_WASTE = 1.25  # how many times as large as needed a segment may be that is used again


class Segment(NamedTuple):
    """A piece of memory of a rank, as it tells it to the others: a file descriptor and its size."""

    descriptor: int
    num_bytes: int


class Pool:
    """The segments of this rank; those that no tensor uses any more are used again."""

    def __init__(self) -> None:
        self._maps: dict[Segment, mmap.mmap] = {}
        self._free: list[Segment] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Segment]:
        """Make a tensor that others may write into as long as it exists, or raise OSError."""
        needed = max(1, torch.Size(shape).numel() * dtype.itemsize)
        segment = self._take(needed)
        # The tensor keeps this array alive, and nothing else does.
        array = (c_char * segment.num_bytes).from_buffer(self._maps[segment])
        weakref.finalize(array, self._free.append, segment).atexit = False
        return _as_tensor(array, shape, dtype), segment

    def _take(self, num_bytes: int) -> Segment:
        fitting = [s for s in self._free if num_bytes <= s.num_bytes <= _WASTE * num_bytes + _GRAIN]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.num_bytes)
            self._free.remove(segment)
            return segment
        size = -(-num_bytes // _GRAIN) * _GRAIN
        descriptor = os.memfd_create("vigpipe")
        os.ftruncate(descriptor, size)
        segment = Segment(descriptor, size)
        self._maps[segment] = mmap.mmap(descriptor, size)
        return segment


class Window:
    """The segments of another process of this machine."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._maps: dict[Segment, mmap.mmap] = {}

    def tensor(self, segment: Segment, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that the process has in a segment; OSError if it cannot be reached."""
        if segment not in self._maps:
            descriptor = os.open(f"/proc/{self._process_id}/fd/{segment.descriptor}", os.O_RDWR)
            try:
                self._maps[segment] = mmap.mmap(descriptor, segment.num_bytes)
            finally:
                os.close(descriptor)
        array = (c_char * segment.num_bytes).from_buffer(self._maps[segment])
        return _as_tensor(array, shape, dtype)


def _as_tensor(array: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(array, dtype=dtype, count=count).view(shape)


def this_machine() -> str:
    """Return a text that two processes share only if they can reach one another's memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
