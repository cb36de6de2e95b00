"""Average tensors over replicas; every rank does so with those that hold the same stages.

A sum must not depend on the cut into stages, or a run could not be repeated with another one. An
all-reduce adds in an order that depends on where in the buffer a number lies. Here every number is
summed in the order of the replicas, in float64, and rounded once.

Over all replicas, each rank receives one D-th of every replica's numbers (all-to-all), averages it,
and sends the mean to all (all-gather). For P numbers of 4 bytes a rank sends 2 (D - 1) / D * 4 P
bytes, as a ring all-reduce does. Two replicas alone send one another all their numbers, 4 P bytes
each, and both compute the mean.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.gradients import gather_vectors
from vigpipe.replication.decisions import ALL


class Exchange:
    """Averages over replicas; the ranks concerned call each method together.

    Args:
        group: the D ranks that hold the same stages; None for a replica alone.

    Attributes:
        bytes_sent: bytes of averaged tensors that this rank has sent.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._size = 1 if group is None else group.size()
        self.bytes_sent = 0

    def mean(
        self, tensors: Sequence[Tensor], weight: Tensor, partner: int = ALL
    ) -> tuple[list[Tensor], Tensor]:
        """Average tensors over replicas, each with its weight.

        Args:
            tensors: of one dtype; the same shapes on every rank.
            weight: how much this replica's tensors count, a float64 scalar, not negative.
            partner: the other replica, or ALL.

        Returns:
            The means, bit for bit the same on every rank, and the sum of the weights. If all
            weights are 0, each counts the same.
        """
        if self._group is None:
            return list(tensors), weight
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        weights = self.gather(weight.reshape(1), partner).flatten()  # (replicas,)
        sum_of_weights = weights.sum()
        weights = torch.where(sum_of_weights > 0, weights, torch.ones_like(weights))
        if partner == ALL:
            mean = self._mean_of_all(flat, weights)
        else:
            mean = _weighted_mean(self.gather(flat, partner), weights)
            self.bytes_sent += flat.numel() * flat.element_size()
        parts = mean.split([tensor.numel() for tensor in tensors])
        return [m.view_as(t) for m, t in zip(parts, tensors, strict=True)], sum_of_weights

    def _mean_of_all(self, values: Tensor, weights: Tensor) -> Tensor:
        chunk = -(-len(values) // self._size)
        padded = values.new_zeros(self._size * chunk)
        padded[: len(values)] = values
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self._group)
        mean = _weighted_mean(received.view(self._size, chunk), weights)
        self.bytes_sent += 2 * (self._size - 1) * chunk * values.element_size()
        return self.gather(mean).flatten()[: len(values)]

    def gather(self, values: Tensor, partner: int = ALL) -> Tensor:
        """Gather a vector (n,) from each replica: (replicas, n), in their order.

        Args:
            values: this replica's.
            partner: the other replica, or ALL.
        """
        if partner == ALL or self._group is None or values.numel() == 0:
            return gather_vectors(values, self._group)
        other = torch.empty_like(values)
        messages = [
            dist.P2POp(dist.isend, values.contiguous(), group=self._group, group_peer=partner),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=partner),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        both = [values, other] if self._group.rank() < partner else [other, values]
        return torch.stack(both)


def _weighted_mean(by_replica: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean over replicas of (replicas, n), summed in their order."""
    total = by_replica.new_zeros(by_replica.shape[1], dtype=torch.float64)
    for values, weight in zip(by_replica, weights, strict=True):
        total += values.double() * weight
    return (total / weights.sum()).to(by_replica.dtype)
