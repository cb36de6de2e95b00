"""A thread that works on tasks in order, with OpenMP threads of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Pool:
    """Threads that sum, besides those of the rank; a kernel in the pool uses `num_threads`.

    One Python thread takes the tasks in the order in which they come. The kernels release the
    interpreter, so the thread that gives the tasks goes on meanwhile.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(1, "sums", self._begin)
        of_rank = torch.get_num_threads()
        self._executor.submit(torch.get_num_threads).result()
        # torch sets the number for the calling thread and for threads that begin later: wait for
        # the pool's to begin, then set that of the rank again.
        torch.set_num_threads(of_rank)

    def _begin(self) -> None:
        torch.set_num_threads(self._num_threads)
        torch.set_grad_enabled(False)  # tasks fill tensors of functions with their own backward

    def start(self, task: Callable[[], None]) -> "Future[None]":
        return self._executor.submit(task)

    def close(self) -> None:
        """Finish the task under way, forget the others, and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
