"""Make what comes next in a thread, while the trainer works on what came before."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Ahead(Generic[Value]):
    """Makes the values of some numbers, the next ones ahead of time.

    What is made ahead is what would be made later. An error comes when the value is asked for.

    Args:
        make: makes the value of a number; this thread and the other one may call it at once.
        most: how many values are made ahead and kept at a time.
    """

    def __init__(self, make: Callable[[int], Value], most: int) -> None:
        self._make, self._most = make, most
        self._thread: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[Value]] = {}

    def take(self, number: int, following: Sequence[int]) -> Value:
        """Return the value of a number, and begin with those that follow."""
        future, wanted = self._coming.pop(number, None), list(islice(following, self._most))
        for other in [other for other in self._coming if other not in wanted]:
            self._coming.pop(other).cancel()
        value = self._make(number) if future is None else future.result()
        if wanted and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        for other in wanted:
            if self._thread is not None and other not in self._coming:
                self._coming[other] = self._thread.submit(self._make, other)
        return value

    def close(self) -> None:
        """Forget what is being made, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._coming.clear()
