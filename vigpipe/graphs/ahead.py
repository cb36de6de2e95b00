"""Make the next values in a thread, while the trainer works on the one before."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Ahead(Generic[Value]):
    """Makes the values of some numbers, at most `most` of the next ones ahead of time.

    A value must not depend on when it is made, and both threads may call `make` at once. An error
    in it is raised when the value is asked for.
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
        for other in wanted:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="ahead")
            if other not in self._coming:
                self._coming[other] = self._thread.submit(self._make, other)
        return value

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._coming.clear()
