"""Replicas that are threads of one process, and exchange tensors as ranks do."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tests.threads import Meeting, in_threads
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.decisions import ALL
from vigpipe.replication.exchange import Exchange

T = TypeVar("T")
SHAPES = {"conv": (12, 5, 3, 1), "bias": (12,), "matrix": (9, 20), "row": (1, 30), "one": (1,)}


class Together(Exchange):
    """An exchange with the other threads; only messages that are sent are counted, not sums."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(Counterparts(None))
        self._all.size, self._meeting = meeting.size, meeting

    def gather(self, values: Tensor, partner: int = ALL) -> Tensor:
        of_all = torch.stack(self._meeting.shown(values.clone()))
        return of_all if partner == ALL else of_all[sorted((self._meeting.rank, partner))]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.gather(tensor).double().sum(0).to(tensor.dtype) for tensor in tensors]

    def mean(
        self, tensors: Sequence[Tensor], weight: Tensor, partner: int = ALL
    ) -> tuple[list[Tensor], Tensor]:
        total = self.gather(weight.reshape(1), partner).sum()
        weighted = [self.gather(tensor.double() * weight, partner) for tensor in tensors]
        means = [(w.sum(0) / total).to(t.dtype) for w, t in zip(weighted, tensors, strict=True)]
        return means, total


def run_together(num_replicas: int, work: Callable[[Together, int], T]) -> list[T]:
    """Call work(exchange, replica) in a thread for each replica; return what they returned."""
    return in_threads(num_replicas, lambda meeting: work(Together(meeting), meeting.rank))


def tensors_of(replica: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What a replica adds up in a step: tensors of these shapes."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES.values()]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All their numbers in a row."""
    return torch.cat([tensor.flatten() for tensor in tensors])
