"""Add up matrices over replicas by their factors of low rank (--compress powersgd:R)."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vigpipe.replication.compression import Method, Named, Shapes, Sums, bytes_of_sum
from vigpipe.replication.decisions import ALL
from vigpipe.replication.exchange import Exchange


class PowerSgd(Method):
    """Sends two factors of rank R instead of a matrix.

    Vogels et al. 2019 (arXiv:1905.13727), algorithm 1. A tensor is a matrix M of its first
    dimension and all others. With Q from the last sum, P = M Q is summed over the replicas and made
    orthonormal, Q = M^T P is summed, and the sum of all M is about P Q^T. Vectors, and matrices
    that do not become smaller, (r + c) R >= r c, are sent uncompressed.

    Between two replicas alone, each sends P and Q of its own matrix.

    Every replica multiplies the sums of the factors by itself, so all get the same bits only with
    equal processors and numbers of threads.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def lossy(self, shapes: Shapes) -> list[str]:
        return [name for name, shape in shapes.items() if self._num_sent(shape) < math.prod(shape)]

    def first_memory(self, tensors: Named, seed: int) -> dict[str, Tensor]:
        """Return random Q, (c, R), which depend on the seed and the name."""
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        memory: dict[str, Tensor] = {}
        for name in self.lossy(shapes):
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            size = math.prod(shapes[name][1:]), self._rank
            memory[name] = torch.randn(size, generator=generator).to(tensors[name])
        return memory

    def add_up(self, tensors: Named, memory: Named, exchange: Exchange, partner: int) -> Sums:
        if partner == ALL:
            return _with_all(tensors, memory, exchange)
        return _in_pair(tensors, memory, exchange, partner)

    def bytes_sent(self, shapes: Shapes, itemsize: int, num_replicas: int, partner: int) -> int:
        lossy = set(self.lossy(shapes))
        first = sum(
            self._rank * shape[0] if name in lossy else math.prod(shape)
            for name, shape in shapes.items()
        )
        second = sum(self._rank * math.prod(shapes[name][1:]) for name in lossy)
        if partner != ALL:
            return (first + second) * itemsize
        return sum(bytes_of_sum(n, itemsize, num_replicas) for n in (first, second))

    def _num_sent(self, shape: Sequence[int]) -> int:
        if len(shape) < 2:
            return math.prod(shape)
        return self._rank * (shape[0] + math.prod(shape[1:]))


def _with_all(tensors: Named, memory: Named, exchange: Exchange) -> Sums:
    whole, matrices = _divided(tensors, memory)
    own_p = [matrix @ memory[name] for name, matrix in matrices.items()]  # (r, R)
    sums = exchange.sum([*whole.values(), *own_p])
    totals = dict(zip(whole, sums, strict=False))
    p = dict(zip(matrices, map(orthonormal, sums[len(whole) :]), strict=True))
    own_q = {name: matrix.mT @ p[name] for name, matrix in matrices.items()}  # (c, R)
    # Each sum gets memory of its own: the bits of a product may depend on where its factors lie.
    sums_of_q = [total.clone() for total in exchange.sum(list(own_q.values()))]
    q = dict(zip(matrices, sums_of_q, strict=True))
    sent = dict(whole)
    for name in matrices:
        totals[name] = (p[name] @ q[name].mT).view_as(tensors[name])
        sent[name] = (p[name] @ own_q[name].mT).view_as(tensors[name])
    return Sums({name: totals[name] for name in tensors}, sent, q)


def _in_pair(tensors: Named, memory: Named, exchange: Exchange, partner: int) -> Sums:
    whole, matrices = _divided(tensors, memory)
    p = {name: orthonormal(matrix @ memory[name]) for name, matrix in matrices.items()}
    q = {name: matrix.mT @ p[name] for name, matrix in matrices.items()}
    parts = [*whole.values(), *p.values(), *q.values()]
    message = torch.cat([part.flatten() for part in parts])
    by_replica: list[dict[str, Tensor]] = []
    for row in exchange.gather_counted(message, partner):
        numbers = row.split([part.numel() for part in parts])
        read = [n.view_as(part).clone() for n, part in zip(numbers, parts, strict=True)]
        its_p = read[len(whole) : len(whole) + len(p)]
        factors = zip(matrices, its_p, read[len(whole) + len(p) :], strict=True)
        products = {name: (a @ b.mT).view_as(tensors[name]) for name, a, b in factors}
        by_replica.append(dict(zip(whole, read, strict=False)) | products)
    first, second = by_replica
    totals = {n: (first[n].double() + second[n].double()).to(first[n].dtype) for n in tensors}
    products = {name: (p[name] @ q[name].mT).view_as(tensors[name]) for name in matrices}
    return Sums(totals, {**whole, **products}, q)


def orthonormal(p: Tensor) -> Tensor:
    """Return orthonormal columns, (r, R), that span those of p, (r, R), and more if needed.

    R <= r, and more are needed if the columns of p are linearly dependent. If a number of p is not
    finite, all are NaN.
    """
    return torch.linalg.qr(p)[0].contiguous()


def _divided(tensors: Named, memory: Named) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that are sent uncompressed, and the others as matrices, (r, c)."""
    whole = {name: tensor for name, tensor in tensors.items() if name not in memory}
    return whole, {name: tensors[name].flatten(1) for name in memory}
