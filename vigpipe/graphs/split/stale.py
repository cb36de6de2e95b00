"""Halos of the step before, which travel while a step is computed (PipeGCN)."""

import contextlib
from collections.abc import Callable
from itertools import count

from torch import Tensor

Slot = tuple[str, int]


class StaleHalos:
    """What has been sent to a rank in the last step, or is still on its way.

    Wan, Li, Wolfe, Kyrillidis, Kim, Lin 2022, "PipeGCN" (arXiv:2203.10428), without its smoothing:
    features and gradients that cross a boundary are one step old; the first step takes its own.
    A slot is one of the exchanges of a step.
    """

    def __init__(self) -> None:
        self._coming: dict[Slot, Callable[[], Tensor]] = {}
        self._slots = count()

    def begin_step(self) -> None:
        self._slots = count()

    def slot(self) -> int:
        return next(self._slots)

    def last(self, slot: Slot, begun: Callable[[], Tensor]) -> Tensor:
        """Return what came in the last step, and remember what `begun` waits for in this one."""
        before = self._coming.get(slot)
        if before is None:
            rows = begun()
            self._coming[slot] = lambda: rows
            return rows
        self._coming[slot] = begun
        return before()

    def finish(self) -> None:
        """Wait for what is still on its way; other ranks may be gone."""
        for coming in self._coming.values():
            with contextlib.suppress(RuntimeError):
                coming()
        self._coming = {}
