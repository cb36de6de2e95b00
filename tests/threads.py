"""Ranks as threads of one process, which show one another what ranks would send."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

T = TypeVar("T")


class Meeting:
    """Where some threads meet, as one of them sees it."""

    def __init__(self, rank: int, barrier: Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, len(board)
        self._barrier, self._board = barrier, board

    def shown(self, value: Any) -> list[Any]:
        """What all of them show, in their order; nobody may change what it shows."""
        self._board[self.rank] = value
        self._barrier.wait()
        shown = list(self._board)
        self._barrier.wait()
        return shown


def in_threads(size: int, work: Callable[[Meeting], T]) -> list[T]:
    """Return work(meeting) of each of some threads at once; one that fails ends all."""
    barrier, board = Barrier(size, timeout=60), [None] * size

    def run(rank: int) -> T:
        try:
            return work(Meeting(rank, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
