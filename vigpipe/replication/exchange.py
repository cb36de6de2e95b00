"""Average or add up tensors over replicas; every rank does so with those that hold the same stages.

A sum must not depend on the cut into stages, or a run could not be repeated with another one. An
all-reduce adds in an order that depends on where in the buffer a number lies. Here every number is
summed in the order of the replicas, in float64, and rounded once.

Over all replicas, each rank receives one D-th of every replica's numbers (all-to-all), averages it,
and sends the mean to all (all-gather). For P numbers of 4 bytes a rank sends 2 (D - 1) / D * 4 P
bytes, as a ring all-reduce does. Two replicas alone send one another all their numbers, 4 P bytes
each, and both compute the mean. Every pair has a process group of its own, because with gloo one
message that does not arrive in time closes all connections of its group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.decisions import ALL

Means = tuple[list[Tensor], Tensor]  # the means, and the sum of the weights
BLOCK = 1 << 16  # number of numbers that a CPU averages at once


class Exchange:
    """Averages and adds up over replicas; the ranks concerned call each method together.

    Tensors that are given together have one dtype, and the same shapes on every rank. A partner is
    the other replica of a pair, or ALL.

    The counterparts are the D ranks that hold the same stages. The links are process groups of this
    rank and one other each, by the index of the other among all.
    """

    def __init__(
        self, counterparts: Counterparts, links: Mapping[int, dist.ProcessGroup] | None = None
    ) -> None:
        self._all, self._links = counterparts, links or {}
        self.bytes_sent = 0  # of averaged tensors, by this rank

    @property
    def size(self) -> int:
        return self._all.size

    def mean(self, tensors: Sequence[Tensor], weight: Tensor, partner: int = ALL) -> Means:
        """Average tensors over replicas, each with its weight, a float64 scalar that is >= 0.

        The means are bit for bit the same on every rank. If all weights are 0, each replica counts
        the same.
        """
        if self.size == 1:
            return list(tensors), weight
        weights = self.gather(weight.reshape(1), partner).flatten()  # (replicas,)
        sum_of_weights = weights.sum()
        weights = torch.where(sum_of_weights > 0, weights, torch.ones_like(weights))
        return self._combine(tensors, weights, weights.sum(), partner), sum_of_weights

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add up tensors over all replicas, with bit for bit the same sums on every rank."""
        if self.size == 1 or not tensors:
            return list(tensors)
        ones = tensors[0].new_ones(self.size, dtype=torch.float64)
        return self._combine(tensors, ones, ones[0], ALL)

    def _combine(
        self, tensors: Sequence[Tensor], weights: Tensor, divisor: Tensor, partner: int
    ) -> list[Tensor]:
        sizes = [tensor.numel() for tensor in tensors]
        chunk = -(-sum(sizes) // self.size)
        flat = tensors[0].new_zeros(self.size * chunk)  # padded to a chunk for each replica
        for part, tensor in zip(flat[: sum(sizes)].split(sizes), tensors, strict=True):
            part.copy_(tensor.detach().flatten())
        if partner == ALL:
            own = _weighted_sum(self._all.exchange(flat).chunk(self.size), weights, divisor)
            combined = self.gather(own).flatten()[: sum(sizes)]
            self.bytes_sent += 2 * (self.size - 1) * own.nbytes
        else:
            own = flat[: sum(sizes)]
            combined = _weighted_sum(self._swap(own, partner), weights, divisor)
            self.bytes_sent += own.nbytes
        parts = combined.split(sizes)
        return [c.view_as(t) for c, t in zip(parts, tensors, strict=True)]

    def gather_counted(self, message: Tensor, partner: int = ALL) -> Tensor:
        """Gather a vector as `gather` does, and count the bytes that this rank sends."""
        self.bytes_sent += message.nbytes * (self.size - 1 if partner == ALL else 1)
        return self.gather(message, partner)

    def gather(self, values: Tensor, partner: int = ALL) -> Tensor:
        """Gather a vector (n,) from each replica: (replicas, n), in their order."""
        if partner == ALL or self.size == 1 or values.numel() == 0:
            return self._all.gather(values)
        return torch.stack(self._swap(values, partner))

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to the rank with index `to` among all, which must receive them."""
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        self._transfer(to, (dist.isend, flat))
        self.bytes_sent += flat.nbytes

    def receive(self, like: Sequence[Tensor], source: int) -> list[Tensor]:
        """Return the tensors, with shapes and dtype as in `like`, that one rank sends."""
        sizes = [tensor.numel() for tensor in like]
        flat = like[0].new_empty(sum(sizes))
        self._transfer(source, (dist.irecv, flat))
        return [p.view_as(t) for p, t in zip(flat.split(sizes), like, strict=True)]

    def _swap(self, values: Tensor, partner: int) -> list[Tensor]:
        """Exchange values with a partner; return those of both, in the order of the replicas."""
        other = torch.empty_like(values)
        self._transfer(partner, (dist.isend, values.contiguous()), (dist.irecv, other))
        is_first = self._links[partner].rank() == 0
        return [values, other] if is_first else [other, values]

    def _transfer(self, other: int, *messages: tuple[Callable[..., Any], Tensor]) -> None:
        """Send tensors to one other rank, or receive them, and wait for all of them."""
        link = self._links[other]
        peer = 1 - link.rank()
        operations = [dist.P2POp(what, t, group=link, group_peer=peer) for what, t in messages]
        for message in dist.batch_isend_irecv(operations):
            message.wait()


def _weighted_sum(by_replica: Sequence[Tensor], weights: Tensor, divisor: Tensor) -> Tensor:
    """Sum the replicas' numbers, (n,) each, in the order of the replicas."""
    result = torch.empty_like(by_replica[0])
    # On a CPU, a block and its sum in float64 stay in the cache, and need no new pages.
    size = BLOCK if result.device.type == "cpu" else max(1, len(result))
    blocks = zip(*(values.split(size) for values in by_replica), strict=True)
    for of_result, block in zip(result.split(size), blocks, strict=True):
        total = torch.zeros_like(of_result, dtype=torch.float64)
        for values, weight in zip(block, weights, strict=True):
            total += values.double().mul_(weight)
        of_result.copy_(total.div_(divisor))
    return result
