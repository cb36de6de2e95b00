"""Find ranks that have become slow, from what every rank's own work takes in a step.

Replicas of a stage do the same work, so each is held against the others; a stage without replicas
is held against itself in the steps before, in proportion to how all other ranks have changed, so
that a machine on which everything slows down raises no alarm. Medians over a window ignore single
slow steps: images that were not in memory, or a neighbour that compiled something.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vigpipe.parallel.layout import Layout

WINDOW = 12  # steps whose median counts: an alarm comes at most that many after the cause
WARM_UP = 3  # steps that are not looked at: compilers, caches and allocators settle
ALARM = 1.5  # times slower than expected


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow.

    Attributes:
        rank: position in the world.
        stage: its position in the pipeline.
        seconds: median of its forwards and backwards in a step.
        expected: the same of the ranks it is held against.
    """

    rank: int
    stage: int
    seconds: float
    expected: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (stage {self.stage}) is a straggler: its work takes "
            f"{1e3 * self.seconds:.0f} ms a step, {self.seconds / self.expected:.1f} times the "
            f"{1e3 * self.expected:.0f} ms expected; look at its host for other load, heat or "
            "swapping"
        )


class Stragglers:
    """Watches the ranks of a run; each straggler is told once, until it has recovered.

    Args:
        layout: who does the same work.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        ranks = range(layout.world_size)
        self._recent = [deque[float](maxlen=WINDOW) for _ in ranks]
        self._usual: list[float] | None = None  # by rank: the first full window's median
        self._told: set[int] = set()
        self._left = WARM_UP

    def add(self, busy_seconds: Sequence[float]) -> list[Straggler]:
        """Take a step's work, by rank; return who has become slow."""
        if self.layout.world_size == 1:
            return []
        if self._left:
            self._left -= 1
            return []
        for recent, seconds in zip(self._recent, busy_seconds, strict=True):
            recent.append(seconds)
        if len(self._recent[0]) < WINDOW:
            return []
        now = [median(recent) for recent in self._recent]
        if self._usual is None:
            self._usual = now
        found: list[Straggler] = []
        for rank, seconds in enumerate(now):
            expected = self._expected(rank, now)
            if seconds > ALARM * expected > 0:
                if rank not in self._told:
                    stage = self.layout.pipeline_rank(rank)
                    found.append(Straggler(rank, stage, seconds, expected))
                self._told.add(rank)
            elif seconds < (1 + ALARM) / 2 * expected:
                self._told.discard(rank)
        return found

    def _expected(self, rank: int, now: list[float]) -> float:
        stage = self.layout.pipeline_rank(rank)
        peers = [
            other
            for other in range(self.layout.world_size)
            if other != rank and self.layout.pipeline_rank(other) == stage
        ]
        if peers:
            return median(now[other] for other in peers)
        assert self._usual is not None
        changes = [
            now[other] / self._usual[other]
            for other in range(self.layout.world_size)
            if other != rank and self._usual[other] > 0
        ]
        # All may be faster than at first, but a rank alone is not expected to be.
        return self._usual[rank] * max(1.0, median(changes or [1.0]))
