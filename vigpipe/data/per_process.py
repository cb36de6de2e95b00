"""What every process opens for itself, such as a memory map: it cannot be pickled."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Opened = TypeVar("Opened")


class PerProcess(Generic[Opened]):
    """Opens something once, when a thread first asks for it, and keeps it in this process.

    A pickle holds only `open_`, which is a function of a module, or a partial of one.
    """

    def __init__(self, open_: Callable[[], Opened]) -> None:
        self._open = open_
        self._opened: list[Opened] = []  # at most one
        self._lock = threading.Lock()

    def __call__(self) -> Opened:
        """Return what is opened; after an InputError another call tries again."""
        with self._lock:
            if not self._opened:
                self._opened.append(self._open())
        return self._opened[0]

    def __reduce__(self) -> tuple[type["PerProcess[Opened]"], tuple[Callable[[], Opened]]]:
        return PerProcess, (self._open,)
