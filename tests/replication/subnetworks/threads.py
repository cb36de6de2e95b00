"""Ranks with the same stages that are threads of one process."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tests.threads import Meeting, in_threads
from vigpipe.parallel.counterparts import Counterparts

T = TypeVar("T")


class Threads(Counterparts):
    """The ranks with the same stages, one of which this thread is."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(None)
        self.size, self.rank, self._meeting = meeting.size, meeting.rank, meeting

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack(self._meeting.shown(values.clone()))

    def exchange(self, chunks: Tensor) -> Tensor:
        shown = self._meeting.shown(chunks.clone())
        return torch.cat([of_rank.chunk(self.size)[self.rank] for of_rank in shown])

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        shown = self._meeting.shown([part.clone() for part in parts])
        received = [of_rank[self.rank] for of_rank in shown]
        assert [len(part) for part in received] == list(sizes)
        return received


def run_threads(num_ranks: int, work: Callable[[Threads], T]) -> list[T]:
    """Call work(ranks) in a thread for each rank; return what they returned."""
    return in_threads(num_ranks, lambda meeting: work(Threads(meeting)))
