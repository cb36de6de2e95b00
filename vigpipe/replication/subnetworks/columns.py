"""Exchange columns between the ranks that share the channels of a wide model."""

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.counterparts import Counterparts


class RankColumns:
    """Ranks with the same stages, each with a block of the channels; see `model.gnn.columns`."""

    def __init__(self, across_teams: Counterparts) -> None:
        self._across_teams = across_teams
        self.size, self.rank = across_teams.size, across_teams.rank

    def from_(self, source: int, block: Tensor) -> Tensor:
        """Return the block of one rank; every rank gives its own, all of one shape."""
        block = block.contiguous()
        received = block if source == self.rank else torch.empty_like(block)
        self._across_teams.copy_from(source, received)
        return received

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, in their order: the same bits on all of them."""
        first, *others = self._across_teams.gather(part.flatten())
        for other in others:
            first = first + other
        return first.view_as(part)

    def total_at(self, target: int, part: Tensor) -> Tensor | None:
        """Return the sum of all ranks' parts on one of them, and None on the others."""
        group = self._across_teams.group
        if self.rank != target:
            dist.send(part.contiguous(), group=group, group_dst=target)
            return None
        total = torch.zeros_like(part)
        for rank in range(self.size):
            received = part
            if rank != self.rank:
                received = torch.empty_like(part, memory_format=torch.contiguous_format)
                dist.recv(received, group=group, group_src=rank)
            total += received
        return total
