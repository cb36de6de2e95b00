"""Ranks that are threads of one process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from vigpipe.parallel.counterparts import Counterparts

T = TypeVar("T")


class Threads(Counterparts):
    """The ranks with the same stages, one of which this thread is."""

    def __init__(self, board: list[Any], barrier: threading.Barrier, place: int) -> None:
        super().__init__(None)
        self.size, self.place = len(board), place
        self._board, self._barrier = board, barrier

    def _shown(self, value: Any) -> list[Any]:
        """Return what all of them show."""
        self._board[self.place] = value
        self._barrier.wait()
        shown = list(self._board)
        self._barrier.wait()
        return shown

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack(self._shown(values.clone()))

    def exchange(self, chunks: Tensor) -> Tensor:
        return torch.cat([c.chunk(self.size)[self.place] for c in self._shown(chunks.clone())])

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = [of_rank[self.place].clone() for of_rank in self._shown(list(parts))]
        self._barrier.wait()
        assert [len(part) for part in received] == list(sizes)
        return received


def run_threads(num_ranks: int, work: Callable[[Threads], T]) -> list[T]:
    """Call work(ranks) in a thread for each rank; return what they returned."""
    board: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=60)

    def run(place: int) -> T:
        try:
            return work(Threads(board, barrier, place))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
