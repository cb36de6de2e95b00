"""Halos of the step before, which travel while a step is computed (PipeGCN)."""

import contextlib
from collections.abc import Callable

from torch import Tensor

Slot = tuple[str, int]


class StaleHalos:
    """What has been sent to a rank in the last step, or is still on its way.

    Wan, Li, Wolfe, Kyrillidis, Kim, Lin 2022, "PipeGCN" (arXiv:2203.10428), without its smoothing:
    features and gradients that cross a boundary are one step old. Those of the first step are its
    own. A slot is one place in a step where something crosses.
    """

    def __init__(self) -> None:
        self._coming: dict[Slot, Callable[[], Tensor]] = {}
        self._next = 0

    def begin_step(self) -> None:
        """Count the places in a step anew."""
        self._next = 0

    def slot(self) -> int:
        """Return the number of the next place in a step."""
        self._next += 1
        return self._next - 1

    def last(self, slot: Slot, begun: Callable[[], Tensor]) -> Tensor:
        """Return what came in the last step, and remember what comes in this one.

        Args:
            slot: where in the step.
            begun: waits for what is sent in this step, and returns it.
        """
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
