"""Sums over edges with a product before or after them, in chunks of nodes, with gradients.

The pool sums S, the rank multiplies by W. In both orders one direction goes through the chunks as
they come, and the other one waits for the chunks that a chunk has edges from:

                          pool                        rank, meanwhile
    sum, then multiply    Z_k = S_k x + a_k           y_k = Z_k W^T, of the chunk before
      backward            dx_k = S^T_k dZ             dZ_k = dy_k W; at last dW = dy^T Z
    multiply, then sum    y_k = S_k P + a_k           P_k = x_k W^T
      backward            dP_k = S^T_k dy             dx_k = dP_k W; at last dW = dP^T x

A row is summed in one go, so its bits depend neither on the chunks nor on the threads. Products are
made chunk by chunk, those that give gradients of weights at once.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.pool.chunks import turns
from vigpipe.graphs.pool.pool import Pool
from vigpipe.ops.adjacency import Adjacency, Kind
from vigpipe.ops.sparse import write_sums


class PooledSums(NamedTuple):
    """Sums over the edges between n nodes, which a pool makes.

    Attributes:
        pool: its threads.
        chunks: of the nodes, of which one rank has all.
        adjacency: the graph.
        kind: which weights; see `Adjacency.weights`.
        fused: use the fused kernels where there are any.
        transposed: whether the edges are turned round.
    """

    pool: Pool
    chunks: Chunks
    adjacency: Adjacency
    kind: Kind
    fused: bool
    transposed: bool = False

    def turned(self) -> "PooledSums":
        """Return the sums over the edges turned round."""
        return self._replace(transposed=not self.transposed)

    @property
    def rows(self) -> list[slice]:
        """Nodes of each chunk."""
        return [rows for (rows,) in self.chunks.rows]

    def turns(self) -> list[list[slice]]:
        """Return which chunks can be summed when; see `vigpipe.graphs.pool.chunks.turns`."""
        return turns(self.chunks, self.adjacency.transposed if self.transposed else self.adjacency)

    def start(
        self, x: Tensor, rows: slice, out: Tensor, added: Tensor | None = None
    ) -> "Future[None]":
        """Begin to sum a chunk.

        Args:
            x: (n, C), of which the rows are there that the chunk has edges from.
            rows: of the chunk.
            out: (n, C), where the sums of the chunk go.
            added: (n, C), or (C,) for all nodes, that is added to the sums; None for nothing.
        """
        ways = {"transposed": self.transposed, "fused": self.fused}
        part = added if added is None or added.dim() == 1 else added[rows]
        sums = self.adjacency, x, self.kind, rows, out[rows], part
        return self.pool.start(lambda: write_sums(*sums, **ways))

    def start_all(
        self, x: Tensor, out: Tensor, added: Tensor | None = None
    ) -> "list[Future[None]]":
        """Begin to sum all chunks, in order; all rows of x are there."""
        return [self.start(x, rows, out, added) for rows in self.rows]


def pooled_sums(x: Tensor, added: Tensor | None, sums: PooledSums) -> Tensor:
    """Sum what the edges bring, and wait: (n, C) -> (n, C).

    Args:
        x: (n, C).
        added: (n, C), or (C,) for all nodes, that is added to the sums; None for nothing.
        sums: what is summed.
    """
    return _Sums.apply(x, added, sums)  # pyright: ignore[reportReturnType]


def sums_then_product(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    beside: tuple[Tensor, Tensor] | None,
    sums: PooledSums,
) -> Tensor:
    """Compute (S x + added) weight^T + bias, and add another product: (n, C) -> (n, C').

    Args:
        x: (n, C).
        added: (n, C), or None for nothing.
        weight: (C', C).
        bias: (C',), or None for nothing.
        beside: rows, (n, D), and weights, (C', D), whose product is added; None for nothing.
        sums: S.
    """
    own, own_weight = beside or (None, None)
    y = _SumsThenProduct.apply(x, added, weight, bias, own, own_weight, sums)
    return y  # pyright: ignore[reportReturnType]


def product_then_sums(
    x: Tensor,
    weight: Tensor,
    added: Tensor | None,
    beside: tuple[Tensor, Tensor] | None,
    sums: PooledSums,
) -> tuple[Tensor, Tensor]:
    """Compute S (x weight^T) + added, and add another product: (n, C) -> (n, C').

    Args:
        x: (n, C).
        weight: (C', C).
        added: (n, C'), or (C',) for all nodes, that is added to the sums; None for nothing.
        beside: rows, (n, D), and weights, (C', D), whose product is added; None for nothing.
        sums: S.

    Returns:
        The result, and what was summed, x weight^T: (n, C') each.
    """
    own, own_weight = beside or (None, None)
    both = _ProductThenSums.apply(x, weight, added, own, own_weight, sums)
    return both  # pyright: ignore[reportReturnType]


class _Sums(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, sums: PooledSums) -> Tensor:  # noqa: ANN401
        ctx.sums, ctx.added_dim = sums, 0 if added is None else added.dim()
        return _sum(x, added, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_x, needs_added, _ = ctx.needs_input_grad
        d_x = _sum(grad.contiguous(), None, ctx.sums.turned()) if needs_x else None
        return d_x, _of_added(grad, ctx.added_dim) if needs_added else None, None


class _SumsThenProduct(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        own: Tensor | None,
        own_weight: Tensor | None,
        sums: PooledSums,
    ) -> Tensor:
        z, y = torch.empty_like(x), x.new_empty(len(x), len(weight))
        summed = sums.start_all(x, z, added)
        for rows, of_chunk in zip(sums.rows, summed, strict=True):
            part = y[rows]
            if own is not None and own_weight is not None:
                _multiply(own[rows], own_weight.T, bias, part)
            of_chunk.result()
            _multiply(z[rows], weight.T, bias if own is None else part, part)
        ctx.save_for_backward(z, weight, own, own_weight)
        ctx.sums = sums
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (z, weight, own, own_weight), sums = ctx.saved_tensors, ctx.sums.turned()
        needs_x, needs_added, needs_weight, needs_bias, *needs_beside, _ = ctx.needs_input_grad
        d_z = d_x = None
        summed: list[Future[None]] = []
        if needs_x or needs_added:
            d_z = torch.empty_like(z)
            d_x = torch.empty_like(z) if needs_x else None
            turns = sums.turns() if needs_x else [[] for _ in sums.rows]
            for rows, turn in zip(sums.rows, turns, strict=True):
                torch.mm(grad[rows], weight, out=d_z[rows])
                if d_x is not None:
                    summed += [sums.start(d_z, ready, d_x) for ready in turn]
        d_weight = grad.T @ z if needs_weight else None
        d_bias = grad.sum(0) if needs_bias else None
        of_beside = _beside_backward(grad, own, own_weight, needs_beside)
        _wait(summed)
        return d_x, d_z if needs_added else None, d_weight, d_bias, *of_beside, None


class _ProductThenSums(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        added: Tensor | None,
        own: Tensor | None,
        own_weight: Tensor | None,
        sums: PooledSums,
    ) -> tuple[Tensor, Tensor]:
        products = x.new_empty(len(x), len(weight))
        y = torch.empty_like(products)
        summed: list[Future[None]] = []
        for rows, turn in zip(sums.rows, sums.turns(), strict=True):
            torch.mm(x[rows], weight.T, out=products[rows])
            summed += [sums.start(products, ready, y, added) for ready in turn]
        of_own = None if own is None or own_weight is None else own @ own_weight.T
        _wait(summed)
        if of_own is not None:
            y.add_(of_own)
        ctx.save_for_backward(x, weight, own, own_weight)
        ctx.sums, ctx.added_dim = sums, 0 if added is None else added.dim()
        ctx.set_materialize_grads(False)
        return y, products

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        grad: Tensor | None,
        of_products: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        (x, weight, own, own_weight), sums = ctx.saved_tensors, ctx.sums.turned()
        needs_x, needs_weight, needs_added, *needs_beside, _ = ctx.needs_input_grad
        # There is none if nothing follows from the sums.
        d_y = x.new_zeros(len(x), len(weight)) if grad is None else grad.contiguous()
        d_products, d_x = torch.empty_like(d_y), torch.empty_like(x) if needs_x else None
        summed = sums.start_all(d_y, d_products, of_products)
        d_added = _of_added(d_y, ctx.added_dim) if needs_added else None
        of_beside = _beside_backward(d_y, own, own_weight, needs_beside)
        for rows, of_chunk in zip(sums.rows, summed, strict=True):
            of_chunk.result()
            if d_x is not None:
                torch.mm(d_products[rows], weight, out=d_x[rows])
        d_weight = d_products.T @ x if needs_weight else None
        return d_x, d_weight, d_added, *of_beside, None


def _multiply(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Write x weight + added, (c, C'), to out, which may be what is added."""
    if added is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(added, x, weight, out=out)


def _beside_backward(
    grad: Tensor, own: Tensor | None, own_weight: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the factors of a product that was added, as far as it needs any."""
    needs_own, needs_weight = needs
    d_own = grad @ own_weight if needs_own and own_weight is not None else None
    d_weight = grad.T @ own if needs_weight and own is not None else None
    return d_own, d_weight


def _sum(x: Tensor, added: Tensor | None, sums: PooledSums) -> Tensor:
    y = torch.empty_like(x)
    _wait(sums.start_all(x, y, added))
    return y


def _wait(tasks: "list[Future[None]]") -> None:
    for task in tasks:
        task.result()


def _of_added(grad: Tensor, dim: int) -> Tensor:
    """Return the gradient of what was added to all rows, (C,), or to each, (n, C)."""
    return grad.sum(0) if dim == 1 else grad
