"""A sum over edges that a pool of threads makes, chunk after chunk, of rows that come in chunks."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.split.sums import WholeSums


class PooledSums(NamedTuple):
    """Sums over edges on the host, which a pool makes in chunks of nodes that one rank has."""

    pool: Pool
    chunks: Chunks
    whole: WholeSums

    def transpose(self) -> "PooledSums":
        return self._replace(whole=self.whole.transpose())

    @property
    def rows(self) -> list[slice]:
        return [rows for (rows,) in self.chunks.rows]

    def begin(self, x: Tensor, out: Tensor, added: Tensor | None = None) -> "Summing":
        """Begin to sum x, (n, C), which comes in chunks, plus `added`, (n, C) or (C,), to `out`."""
        return (Summing if is_on_host(x) else SummingFromDevice)(self, x, out, added)


class Summing:
    """A sum in progress; see `PooledSums.begin`."""

    def __init__(self, sums: PooledSums, x: Tensor, out: Tensor, added: Tensor | None) -> None:
        self._sums, self._rows = sums, sums.rows
        self._x, self._out, self._added = x, out, added
        self._tasks: dict[int, Future[None]] = {}
        self._wait: Callable[[], None] = lambda: None  # until x is there, as far as it was given

    def give(self, number: int) -> None:
        """Let the pool sum what it can, now that a chunk of x and all before it are there."""
        # A chunk waits for the last one that it has edges from, or for the first if it has none.
        for chunk, last in enumerate(self._sums.chunks.last_needed(self._sums.whole.graph)):
            if max(0, last) == number:
                self._start(chunk)

    def give_all(self) -> None:
        """Let the pool sum all chunks, in order: all rows of x are there."""
        for number in range(len(self._rows)):
            self._start(number)

    def take(self, number: int) -> None:
        self._tasks[number].result()

    def take_all(self) -> None:
        for number in range(len(self._rows)):
            self.take(number)

    def _start(self, number: int) -> None:
        self._tasks[number] = self._sums.pool.start(partial(self._write, number, self._wait))

    def _write(self, number: int, wait: Callable[[], None]) -> None:
        wait()
        rows, added = self._rows[number], self._added
        part = added if added is None or added.dim() == 1 else added[rows]
        self._sums.whole.write(self._x, [rows], [self._out[rows]], part)


class SummingFromDevice(Summing):
    """A sum of rows on a GPU, which copies each chunk to the host before the pool sums it."""

    def __init__(self, sums: PooledSums, x: Tensor, out: Tensor, added: Tensor | None) -> None:
        of_added = None if added is None else _on_host(added).copy_(added, non_blocking=True)
        super().__init__(sums, _on_host(x), _on_host(out), of_added)
        self._of_device = x, out
        self._wait = _mark(x.device)

    def give(self, number: int) -> None:
        self._send(number)
        super().give(number)

    def give_all(self) -> None:
        for number in range(len(self._rows)):
            self._send(number)
        super().give_all()

    def take(self, number: int) -> None:
        """Wait until a chunk is summed; the GPU copies it before it begins any later work."""
        super().take(number)
        rows, (_, out) = self._rows[number], self._of_device
        out[rows].copy_(self._out[rows], non_blocking=True)

    def _send(self, number: int) -> None:
        rows, (x, _) = self._rows[number], self._of_device
        self._x[rows].copy_(x[rows], non_blocking=True)
        self._wait = _mark(x.device)


def is_on_host(x: Tensor) -> bool:
    """Whether the pool can read a tensor where it is."""
    return x.device.type == "cpu"


def _on_host(like: Tensor) -> Tensor:
    """Make a tensor on the host, in memory that a GPU copies to and from by itself."""
    is_pinned = like.device.type == "cuda"
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=is_pinned)


def _mark(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until a device has done all that it has been given so far."""
    if device.type == "cpu":  # a CPU has done it when the call returns
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
