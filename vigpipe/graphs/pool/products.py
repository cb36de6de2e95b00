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
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.graphs.pool.sums import PooledSums


class SumsAlone(Function):
    """Sum what the edges bring, add (n, C) or (C,), and wait: (n, C) -> (n, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, sums: PooledSums) -> Tensor:
        ctx.sums, ctx.added_dim = sums, 0 if added is None else added.dim()
        return _sum(x, added, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        needs_x, needs_added, _ = ctx.needs_input_grad
        d_x = _sum(grad.contiguous(), None, ctx.sums.transpose()) if needs_x else None
        return d_x, _of_added(grad, ctx.added_dim) if needs_added else None, None


class SumsThenProduct(Function):
    """Compute (S x + added) weight^T + bias, and add another product: (n, C) -> (n, C').

    The weight is (C', C), `added` (n, C), the bias (C',). What is added are the products of the
    node's own rows, (n, D), and their weights, (C', D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        own: Tensor | None,
        own_weight: Tensor | None,
        sums: PooledSums,
    ) -> Tensor:
        z, y = torch.empty_like(x), x.new_empty(len(x), len(weight))
        summing = sums.begin(x, z, added)
        summing.give_all()
        for number, rows in enumerate(sums.rows):
            part = y[rows]
            if own is not None and own_weight is not None:
                _multiply(own[rows], own_weight.T, bias, part)
            summing.take(number)
            _multiply(z[rows], weight.T, bias if own is None else part, part)
        ctx.save_for_backward(z, weight, own, own_weight)
        ctx.sums = sums
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (z, weight, own, own_weight), sums = ctx.saved_tensors, ctx.sums.transpose()
        needs_x, needs_added, needs_weight, needs_bias, *needs_beside, _ = ctx.needs_input_grad
        d_z = d_x = summing = None
        if needs_x or needs_added:
            d_z = torch.empty_like(z)
            if needs_x:
                d_x = torch.empty_like(z)
                summing = sums.begin(d_z, d_x)
            for number, rows in enumerate(sums.rows):
                torch.mm(grad[rows], weight, out=d_z[rows])
                if summing is not None:
                    summing.give(number)
        d_weight = grad.T @ z if needs_weight else None
        d_bias = grad.sum(0) if needs_bias else None
        of_beside = _beside_backward(grad, own, own_weight, needs_beside)
        if summing is not None:
            summing.take_all()
        return d_x, d_z if needs_added else None, d_weight, d_bias, *of_beside, None


class ProductThenSums(Function):
    """Compute S (x weight^T) + added, and add another product; return that, and x weight^T.

    The weight is (C', C), `added` (n, C'), or (C',) for all nodes. What is added are the products
    of the node's own rows, (n, D), and their weights, (C', D). Both results are (n, C').
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        added: Tensor | None,
        own: Tensor | None,
        own_weight: Tensor | None,
        sums: PooledSums,
    ) -> tuple[Tensor, Tensor]:
        products = x.new_empty(len(x), len(weight))
        y = torch.empty_like(products)
        summing = sums.begin(products, y, added)
        for number, rows in enumerate(sums.rows):
            torch.mm(x[rows], weight.T, out=products[rows])
            summing.give(number)
        of_own = None if own is None or own_weight is None else own @ own_weight.T
        summing.take_all()
        if of_own is not None:
            y.add_(of_own)
        ctx.save_for_backward(x, weight, own, own_weight)
        ctx.sums, ctx.added_dim = sums, 0 if added is None else added.dim()
        ctx.set_materialize_grads(False)
        return y, products

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        grad: Tensor | None,
        of_products: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        (x, weight, own, own_weight), sums = ctx.saved_tensors, ctx.sums.transpose()
        needs_x, needs_weight, needs_added, *needs_beside, _ = ctx.needs_input_grad
        # There is no gradient if nothing was computed from the sums.
        d_y = x.new_zeros(len(x), len(weight)) if grad is None else grad.contiguous()
        d_products, d_x = torch.empty_like(d_y), torch.empty_like(x) if needs_x else None
        summing = sums.begin(d_y, d_products, of_products)
        summing.give_all()
        d_added = _of_added(d_y, ctx.added_dim) if needs_added else None
        of_beside = _beside_backward(d_y, own, own_weight, needs_beside)
        for number, rows in enumerate(sums.rows):
            summing.take(number)
            if d_x is not None:
                torch.mm(d_products[rows], weight, out=d_x[rows])
        d_weight = d_products.T @ x if needs_weight else None
        return d_x, d_weight, d_added, *of_beside, None


def _multiply(x: Tensor, weight: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Write x weight + added, (c, C'), to out, which may be `added` itself."""
    if added is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(added, x, weight, out=out)


def _beside_backward(
    grad: Tensor, own: Tensor | None, own_weight: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the factors of a product that was added, if they need any."""
    needs_own, needs_weight = needs
    d_own = grad @ own_weight if needs_own and own_weight is not None else None
    d_weight = grad.T @ own if needs_weight and own is not None else None
    return d_own, d_weight


def _sum(x: Tensor, added: Tensor | None, sums: PooledSums) -> Tensor:
    y = torch.empty_like(x)
    summing = sums.begin(x, y, added)
    summing.give_all()
    summing.take_all()
    return y


def _of_added(grad: Tensor, dim: int) -> Tensor:
    """Return the gradient of what was added to all rows, (C,), or to each, (n, C)."""
    return grad.sum(0) if dim == 1 else grad
