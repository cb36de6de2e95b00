"""The ranks that hold the same stages, one of each replica, and what they send one another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.gradients import gather_vectors


class Counterparts:
    """The ranks of all replicas that hold the same stages; they call each method together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let all ranks of the replica fail together if one of them fails in this context.

        What they do in it must not need one another.
        """
        yield

    def gather(self, values: Tensor) -> Tensor:
        """Gather a vector (n,) from each: (size, n), in their order."""
        return gather_vectors(values, self.group)

    def exchange(self, chunks: Tensor) -> Tensor:
        """Send each rank its chunk of (size * n,), in their order; return what each has sent."""
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=self.group)
        return received

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send each a vector, and return those that come to this rank, which have these sizes."""
        if self.group is None:
            return list(parts)
        received = parts[0].new_empty(sum(sizes))
        lengths = [len(part) for part in parts]
        sent = torch.cat(list(parts))
        dist.all_to_all_single(received, sent, list(sizes), lengths, group=self.group)
        return list(received.split(list(sizes)))

    def copy_from(self, rank: int, tensor: Tensor) -> None:
        """Copy into a tensor what the counterpart at a rank has in it."""
        if self.group is not None:
            dist.broadcast(tensor, group=self.group, group_src=rank)
