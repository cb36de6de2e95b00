"""Sum over the neighbours on a grid of pixels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vigpipe.ops.call import call, can_call, dtype_name, num_threads, sizes


def grid_neighbour_sum(x: Tensor, height: int, width: int) -> Tensor:
    """Sum the features of the up to 8 grid neighbours of every node, without the node itself.

    The sum over a 3x3 window is separable: three shifted terms are added along each axis, then the
    node itself is subtracted. For 32x32 nodes this graph has 7,812 directed edges. Nodes are in
    raster order: (B, N, C) with N = height * width gives (B, N, C).
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _sum(x, height, width)
    return _GridSum.apply(x, height, width)


class _GridSum(torch.autograd.Function):
    """The sum over neighbours, which is its own gradient: who is whose neighbour is symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, height: int, width: int) -> Tensor:
        ctx.grid = height, width
        return _sum(x, height, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return grid_neighbour_sum(grad, *ctx.grid), None, None


def _sum(x: Tensor, height: int, width: int) -> Tensor:
    if x.shape[1] != height * width:
        raise ValueError(f"{height} x {width} nodes are expected (got {x.shape[1]})")
    if x.dtype in (torch.float32, torch.float64) and can_call(x):
        x = x.contiguous()
        total = torch.empty_like(x)
        shape = sizes(x.shape[0], height, width, x.shape[2])
        call(f"grid_sum_{dtype_name(x)}", x, total, *shape, num_threads(x.numel()))
        return total
    grid = x.unflatten(1, (height, width))  # (B, H, W, C)
    rows = F.pad(grid, (0, 0, 0, 0, 1, 1))
    columns = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    columns = F.pad(columns, (0, 0, 1, 1))
    window = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:]
    return (window - grid).flatten(1, 2)
