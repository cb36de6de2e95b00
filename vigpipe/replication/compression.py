"""Add up tensors over replicas while sending fewer bytes (--compress).

Each replica sends an approximation of its tensors, and all get the sum of what was sent. Without
compression a ring sends 2 (D - 1) / D * b P bytes of P numbers of b bytes; a rank sends instead:

                  over all D replicas                        between two alone
    bfloat16      2 (D - 1) / D * 2 P                        2 P
    top-k         (4 + b) k (D - 1)                          (4 + b) k
    powersgd      2 (D - 1) / D * b (U + sum R (r + c))      b (U + sum R (r + c))

k is the sum over tensors of max(1, ceil(RATIO n)), n being the size of a tensor. Each replica sends
them to every other, so with float32 top-k pays only if RATIO < 1 / D, and between two alone if
RATIO < 1 / 2. PowerSGD (`replication.powersgd`) sends U numbers uncompressed, and two factors of
rank R for every r x c matrix. The formulas leave out that P is rounded up to a multiple of D.

Everything is done tensor by tensor, and sums have the order of the replicas, so the numbers do not
depend on the cut into stages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vigpipe.replication.decisions import ALL
from vigpipe.replication.exchange import Exchange

Named = Mapping[str, Tensor]  # tensors by their names
Shapes = Mapping[str, Sequence[int]]
_INDEX_BYTES = 4


class Sums(NamedTuple):
    """The result of a sum over replicas, by the tensors' names."""

    totals: dict[str, Tensor]  # of what each replica has sent, in the tensors' dtype
    sent: dict[str, Tensor]  # by this replica
    memory: dict[str, Tensor]  # what the next sum begins with


class Method(Protocol):
    """A method of compression; `partner` is the other replica of a pair, or ALL."""

    def lossy(self, shapes: Shapes) -> list[str]:
        """Return the names of the tensors that may lose something; by default all."""
        return list(shapes)

    def first_memory(self, tensors: Named, seed: int) -> dict[str, Tensor]:
        """Return the memory of the first sum, the same on every replica; by default nothing."""
        return {}

    def add_up(self, tensors: Named, memory: Named, exchange: Exchange, partner: int) -> Sums:
        """Add up tensors of one dtype over replicas together, with the `memory` of the last sum."""
        ...

    def bytes_sent(self, shapes: Shapes, itemsize: int, num_replicas: int, partner: int) -> int:
        """Return how many bytes a rank sends in a sum; `itemsize` is the bytes of a number."""
        ...


def bytes_of_sum(num_numbers: int, itemsize: int, num_replicas: int, partner: int = ALL) -> int:
    """Return how many bytes a rank sends in an uncompressed sum."""
    if partner != ALL:
        return num_numbers * itemsize
    return 2 * (num_replicas - 1) * -(-num_numbers // num_replicas) * itemsize


class Bfloat16(Method):
    """Sends numbers rounded to bfloat16.

    A sum over all replicas is rounded to bfloat16 once more, on its way back; that rounding error
    is not kept.
    """

    def add_up(self, tensors: Named, memory: Named, exchange: Exchange, partner: int) -> Sums:
        flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        rounded = flat.bfloat16()
        if partner == ALL:
            (total,) = exchange.sum([rounded])
        else:
            first, second = exchange.gather_counted(rounded, partner).double()
            total = first + second
        return Sums(_cut(total.to(flat.dtype), tensors), _cut(rounded.to(flat.dtype), tensors), {})

    def bytes_sent(self, shapes: Shapes, itemsize: int, num_replicas: int, partner: int) -> int:
        return bytes_of_sum(sum(map(math.prod, shapes.values())), 2, num_replicas, partner)


class TopK(Method):
    """Sends the largest `ratio` of each tensor's numbers, rounded up, with their indices."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def add_up(self, tensors: Named, memory: Named, exchange: Exchange, partner: int) -> Sums:
        flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        sizes = [tensor.numel() for tensor in tensors.values()]
        chosen, start = [], 0
        for numbers in flat.split(sizes):
            chosen.append(largest(numbers, self._num_sent(len(numbers))) + start)
            start += len(numbers)
        indices = torch.cat(chosen)
        values = flat[indices]
        message = torch.cat([values.view(torch.uint8), indices.int().view(torch.uint8)])
        total = torch.zeros_like(flat, dtype=torch.float64)
        for row in exchange.gather_counted(message, partner):
            # A copy lies at the start of its memory, as reading bytes as numbers demands.
            received = row.clone()
            its_values = received[: values.nbytes].view(values.dtype)
            its_indices = received[values.nbytes :].view(torch.int32)
            total.index_add_(0, its_indices.long(), its_values.double())
        sent = torch.zeros_like(flat).index_copy_(0, indices, values)
        return Sums(_cut(total.to(flat.dtype), tensors), _cut(sent, tensors), {})

    def bytes_sent(self, shapes: Shapes, itemsize: int, num_replicas: int, partner: int) -> int:
        num_sent = sum(self._num_sent(math.prod(shape)) for shape in shapes.values())
        num_others = num_replicas - 1 if partner == ALL else 1
        return (_INDEX_BYTES + itemsize) * num_sent * num_others

    def _num_sent(self, size: int) -> int:
        return max(1, math.ceil(self._ratio * size))


def largest(numbers: Tensor, k: int) -> Tensor:
    """Find the k numbers, 1 <= k <= n, that are farthest from 0; the first ones among equals.

    NaN counts as infinite, so it is sent, and everybody notices. Return their indices in ascending
    order, (k,) int64.
    """
    sizes = numbers.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = sizes.topk(k).values[-1]
    above, at = sizes > least, sizes == least
    is_chosen = above | (at & (at.cumsum(0) <= k - above.sum()))
    # Indexing with a mask would wait for a GPU. Here what is not chosen is written behind the end.
    targets = torch.where(is_chosen, is_chosen.cumsum(0) - 1, k)
    indices = torch.arange(len(numbers), device=numbers.device)
    return indices.new_zeros(k + 1).scatter_(0, targets, indices)[:k]


def _cut(flat: Tensor, tensors: Named) -> dict[str, Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {n: part.view_as(t) for (n, t), part in zip(tensors.items(), parts, strict=True)}
