"""A matrix most of whose numbers are 0, such as the words of documents, and its products."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from vigpipe.ops.adjacency import Adjacency, Factors
from vigpipe.ops.sparse import check_shape, kernels_for


@dataclass(frozen=True, eq=False)
class SparseRows:
    """The rows of an (n, d) matrix, of which only numbers that are not 0 are stored.

    An edge of `places` from c to r stands for the number in row r and column c; the numbers are
    `values`, (e,).
    """

    places: Adjacency
    values: Tensor

    def __len__(self) -> int:
        return self.places.num_targets

    @property
    def shape(self) -> tuple[int, int]:
        return self.places.num_targets, self.places.num_sources

    @property
    def device(self) -> torch.device:
        return self.values.device

    def part(self, start: int, end: int) -> "SparseRows":
        """Return the rows start ... end - 1."""
        first, last = (int(self.places.indptr[row]) for row in (start, end))
        return SparseRows(self.places.rows(start, end), self.values[first:last])

    def columns(self, numbers: Tensor) -> "SparseRows":
        """Return the matrix of some columns, (c,) int64, ascending."""
        places, device = self.places, self.places.indices.device
        new = torch.full((places.num_sources,), -1, device=device)
        new[numbers] = torch.arange(len(numbers), device=device)
        indices = new[places.indices]
        stays = indices >= 0
        before = F.pad(stays.cumsum(0), (1, 0))  # how many stay of the numbers before each
        indptr = before[places.indptr]
        of_columns = Adjacency.unchecked(indptr, indices[stays], len(numbers))
        return SparseRows(of_columns, self.values[stays])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "SparseRows":
        """Return the matrix on a device, with numbers of this type."""
        return SparseRows(self.places.to(device), self.values.to(device, dtype))

    def dense(self) -> Tensor:
        """Return all numbers, (n, d)."""
        matrix = self.values.new_zeros(self.shape)
        matrix[self.places.targets, self.places.indices] = self.values
        return matrix


def linear(
    x: Tensor | SparseRows,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    fused: bool = True,
) -> Tensor:
    """Compute x weight^T + bias, (n, C); of sparse rows only what is stored is multiplied.

    Products of sparse rows have the type of the weights, also under autocast. Sparse rows get no
    gradient.

    Args:
        x: (n, d).
        weight: (C, d).
        bias: (C,), or (n, C) that is added to the product; None for nothing.
        fused: use the fused kernels where there are any.
    """
    if isinstance(x, SparseRows):
        num_channels = len(weight)
        check_shape("weight", weight, num_channels, x.shape[1])
        if bias is not None:
            check_shape("bias", bias, *(len(x), num_channels)[-bias.dim() :])
        return _Product.apply(weight, bias, x, fused)
    if bias is not None and bias.dim() == 2:
        return torch.addmm(bias, x, weight.T)
    return F.linear(x, weight, bias)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, x: SparseRows, fused: bool
    ) -> Tensor:
        ctx.x, ctx.fused = x, fused
        ctx.bias_dim = 0 if bias is None else bias.dim()
        factors = Factors(of_edges=x.values.to(weight.dtype))
        added = None if bias is None else bias.to(weight.dtype).contiguous()
        kernels = kernels_for(weight, fused)
        return kernels.row_sums(x.places, weight.T.contiguous(), factors, added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            turned, edges = ctx.x.places.transposed, ctx.x.places.turned_edges
            factors = Factors(of_edges=ctx.x.values[edges].to(grad.dtype))
            kernels = kernels_for(grad, ctx.fused)
            d_weight = kernels.row_sums(turned, grad.contiguous(), factors).T.contiguous()
        if ctx.needs_input_grad[1]:
            d_bias = grad.sum(0) if ctx.bias_dim == 1 else grad
        return d_weight, d_bias, None, None
