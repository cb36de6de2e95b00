"""The ranks that hold the same stages, one of each replica, and what they send one another."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.gradients import gather_vectors


class Counterparts:
    """The ranks of all replicas that hold the same stages; they call each method together.

    Args:
        group: the ranks; None for a replica alone.

    Attributes:
        group: the ranks.
        size: how many they are.
        place: of this rank among them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size, self.place = (1, 0) if group is None else (group.size(), group.rank())

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
        """Send each its chunk, and return what it has received from each.

        Args:
            chunks: (size * n,), a chunk for each in their order.
        """
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=self.group)
        return received

    def copy_from(self, place: int, tensor: Tensor) -> None:
        """Take the tensor of one of them."""
        if self.group is not None:
            dist.broadcast(tensor, group=self.group, group_src=place)
