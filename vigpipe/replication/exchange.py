"""Average tensors over replicas; every rank does so with those that hold the same stages.

A sum must not depend on the cut into stages, or a run could not be repeated with another one. An
all-reduce adds in an order that depends on where in the buffer a number lies. Here every number is
summed in the order of the replicas, in float64, and rounded once: each rank receives one D-th of
every replica's numbers (all-to-all), averages it, and sends the mean to all (all-gather). For P
numbers of 4 bytes a rank sends 2 (D - 1) / D * 4 P bytes, as a ring all-reduce does.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.gradients import gather_vectors


class Exchange:
    """Averages over all replicas; the ranks of a group call each method together.

    Args:
        group: the D ranks that hold the same stages; None for a replica alone.

    Attributes:
        bytes_sent: bytes of averaged tensors that this rank has sent.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._size = 1 if group is None else group.size()
        self.bytes_sent = 0

    def mean(self, tensors: Sequence[Tensor], weight: Tensor) -> tuple[list[Tensor], Tensor]:
        """Average tensors over all replicas, each with its weight.

        Args:
            tensors: of one dtype; the same shapes on every rank.
            weight: how much this replica's tensors count, a float64 scalar, not negative.

        Returns:
            The means, bit for bit the same on every rank, and the sum of the weights. If all
            weights are 0, each counts the same.
        """
        if self._group is None:
            return list(tensors), weight
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        weights = self.gather(weight.reshape(1)).flatten()  # (D,)
        sum_of_weights = weights.sum()
        weights = torch.where(sum_of_weights > 0, weights, torch.ones_like(weights))
        chunk = -(-len(flat) // self._size)
        padded = flat.new_zeros(self._size * chunk)
        padded[: len(flat)] = flat
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self._group)
        by_replica = received.view(self._size, chunk)
        total = torch.zeros(chunk, dtype=torch.float64, device=flat.device)
        for values, share in zip(by_replica, weights, strict=True):
            total += values.double() * share
        mean = (total / weights.sum()).to(flat.dtype)
        parts = (
            self.gather(mean).flatten()[: len(flat)].split([tensor.numel() for tensor in tensors])
        )
        self.bytes_sent += 2 * (self._size - 1) * chunk * flat.element_size()
        return [m.view_as(t) for m, t in zip(parts, tensors, strict=True)], sum_of_weights

    def gather(self, values: Tensor) -> Tensor:
        """Gather a vector (n,) from each replica: (D, n), in the order of the replicas."""
        return gather_vectors(values, self._group)
