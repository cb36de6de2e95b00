"""A hidden layer after a Linear on few channels, its BatchNorm and a graph convolution, all folded.

No non-linearity is between them, so together they are one affine map of a node's features: of x, or
with a convolution of [sum of the neighbours, x, number of neighbours]. If x has mean m and
covariance S, then W x + b has mean W m + b and variances diag(W S W^T). So a C x C matrix is enough
to compute the statistics that BatchNorm would measure on hundreds of channels, and the map depends
only on the weights, m and S; gradients flow through m and S too. All this is in float64.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vigpipe import ops


class Norm(NamedTuple):
    """A Linear from C to H channels, and the BatchNorm after it with its scale and shift."""

    weight: Tensor  # (H, C)
    bias: Tensor  # (H,)
    scale: Tensor  # (H,)
    shift: Tensor  # (H,)
    eps: float


class Convolution(NamedTuple):
    """rel * (sum of the neighbours) + bias + root * x, on a grid of nodes."""

    rel: Tensor  # (H, H)
    bias: Tensor  # (H,)
    root: Tensor  # (H, H)
    total: Tensor  # (B, N, C), the sum of the 8 neighbours of every node before the Linear
    grid: tuple[int, int]  # height and width in nodes


def trained(
    x: Tensor, norm: Norm, conv: Convolution | None, second: Tensor, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute gelu(conv(norm(x))) second^T with x's own statistics, without the hidden layer.

    Nodes, (B, N, C), and weights of the output layer, (O, H), give (B, N, O). The second result is
    what the norm counts, without gradients: number of nodes, mean and sum of squared deviations of
    each hidden channel, (3, H) float64.
    """
    tensors = (norm.weight, norm.scale, second, *(() if conv is None else (conv.rel,)))
    fits = x.shape[2] == 3 and second.shape[0] == 3 and second.shape[1] % 16 == 0
    is_same = x.dtype in (torch.float32, torch.float64) and all(t.dtype == x.dtype for t in tensors)
    if fused and fits and is_same and x.numel() and ops.is_fused(x, "hidden"):
        rel, bias, root, total, grid = conv or (None, None, None, None, (0, 0))
        from vigpipe.ops import registered  # needs the compiled library

        return registered.folded(x, total, *norm, rel, bias, root, second, *grid)[:2]
    mean, covariance = moments(x)
    weight = norm.weight.double()
    mean = weight @ mean + norm.bias.double()
    variance = ((weight @ covariance) * weight).sum(1)
    with torch.no_grad():
        num_rows = x.numel() // x.shape[2]
        deviation = variance.clamp(min=0) * num_rows
        counted = torch.stack((torch.full_like(mean, num_rows), mean, deviation)).detach()
    return evaluated(x, norm, conv, second, mean, variance), counted


def evaluated(
    x: Tensor, norm: Norm, conv: Convolution | None, second: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Compute the (B, N, O) of `trained`, given mean and variance of each hidden channel, (H,)."""
    scale = norm.scale * torch.rsqrt(variance.double() + norm.eps)
    first = (norm.weight.double() * scale.unsqueeze(1)).T
    bias = (norm.bias.double() - mean.double()) * scale + norm.shift
    features = x
    if conv is not None:
        rel, root = conv.rel.double(), conv.root.double()
        first = torch.cat((first @ rel.T, first @ root.T, (rel @ bias).unsqueeze(0)))
        bias = root @ bias + conv.bias
        degree = _degree(x, *conv.grid).expand(len(x), -1, -1)
        features = torch.cat((conv.total, x, degree), dim=-1)
    rows = features.flatten(0, 1)
    y = ops.hidden(rows, first.to(rows), bias.to(rows), second)
    return y.unflatten(0, x.shape[:2])


def _degree(x: Tensor, height: int, width: int) -> Tensor:
    """Count the neighbours of every node of a grid: (1, N, 1)."""
    sides = [
        F.pad(x.new_full((n - 2,), 3.0), (1, 1), value=2.0) if n > 1 else x.new_ones(1)
        for n in (height, width)
    ]
    return (sides[0].unsqueeze(1) * sides[1] - 1).view(1, -1, 1)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean, (C,), and covariance, (C, C), of the nodes of (B, N, C), in float64."""
    return _Moments.apply(x)


class _Moments(torch.autograd.Function):
    """Mean and covariance; saves x for the backward, but nothing in double precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1]).double()
        mean = rows.mean(0)
        rows = rows - mean
        ctx.save_for_backward(x, mean)
        return mean, rows.T @ rows / len(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_covariance: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        x, mean = ctx.saved_tensors
        num_rows = x.numel() // x.shape[-1]
        factor = (d_covariance + d_covariance.T) / num_rows
        summand = d_mean / num_rows - mean @ factor
        return torch.addmm(summand.to(x), x.reshape(-1, x.shape[-1]), factor.to(x)).view_as(x)
