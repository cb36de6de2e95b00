"""Find ranks that have become slow, from the time each rank's own work takes in a step.

Replicas of a stage do the same work, so each rank is compared with the other replicas of its stage.
A stage without replicas is compared with itself at the start of the run, scaled by how much all
other ranks have changed since, so that a machine on which everything slows down raises no alarm.
Medians over a window ignore single slow steps, such as those that read images from a cold disk.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vigpipe.parallel.layout import Layout

WINDOW = 12  # steps in a median; an alarm comes at most so many steps after its cause
WARM_UP = 3  # first steps that are ignored, while compilers, caches and allocators settle
ALARM = 1.5  # a straggler takes more than so many times the expected time


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow, by the median time of its forwards and backwards in a step."""

    rank: int
    pipeline_rank: int
    seconds: float
    expected_seconds: float

    def __str__(self) -> str:
        factor = self.seconds / self.expected_seconds
        return (
            f"rank {self.rank} (stage {self.pipeline_rank}) is a straggler: its work takes "
            f"{1e3 * self.seconds:.0f} ms a step, {factor:.1f} times the "
            f"{1e3 * self.expected_seconds:.0f} ms expected; look at its host for other load, "
            "heat or swapping"
        )


class Stragglers:
    """Watches the ranks of a run; each straggler is reported once, and again if it relapses."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        ranks = range(layout.world_size)
        self._recent = [deque[float](maxlen=WINDOW) for _ in ranks]
        self._usual: list[float] | None = None  # by rank: the median of the first full window
        self._reported: set[int] = set()
        self._warm_up_left = WARM_UP

    def add(self, busy_seconds: Sequence[float]) -> list[Straggler]:
        """Take the times of forwards and backwards, by rank; return ranks that have become slow."""
        if self.layout.world_size == 1:
            return []
        if self._warm_up_left:
            self._warm_up_left -= 1
            return []
        for recent, seconds in zip(self._recent, busy_seconds, strict=True):
            recent.append(seconds)
        if len(self._recent[0]) < WINDOW:
            return []
        now = [median(recent) for recent in self._recent]
        if self._usual is None:
            self._usual = now
        new_stragglers: list[Straggler] = []
        for rank, seconds in enumerate(now):
            expected = self._expected(rank, now)
            if seconds > ALARM * expected > 0:
                if rank not in self._reported:
                    pipeline_rank = self.layout.pipeline_rank(rank)
                    new_stragglers.append(Straggler(rank, pipeline_rank, seconds, expected))
                self._reported.add(rank)
            elif seconds < (1 + ALARM) / 2 * expected:
                self._reported.discard(rank)
        return new_stragglers

    def _expected(self, rank: int, now: list[float]) -> float:
        pipeline_rank = self.layout.pipeline_rank(rank)
        others = [other for other in range(self.layout.world_size) if other != rank]
        peers = [o for o in others if self.layout.pipeline_rank(o) == pipeline_rank]
        if peers:
            return median(now[peer] for peer in peers)
        assert self._usual is not None
        changes = [now[o] / self._usual[o] for o in others if self._usual[o] > 0]
        # If all other ranks have become faster, this rank is still not expected to.
        return self._usual[rank] * max(1.0, median(changes or [1.0]))
