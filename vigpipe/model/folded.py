"""Fold a Linear on few channels and its BatchNorm into one affine map, with exact statistics.

If features x have mean m and covariance S, then W x + b has mean W m + b and variances
diag(W S W^T). So a C x C matrix is enough to compute the statistics that BatchNorm would measure on
hundreds of channels. BN(W x + b) = A^T x + a, where A and a depend only on the weights, m and S;
gradients flow through m and S too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vigpipe.model.norm import BatchNorm


def fold_linear(x: Tensor, linear: nn.Linear, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Return `norm(linear(x))` as an affine map; in training, update the norm's statistics too.

    Args:
        x: features, (B, N, C).
        linear: a layer from C to H channels, with a bias.
        norm: the norm after it, with H channels.

    Returns:
        A, (C, H), and a, (H,), float64, such that BN(W x + b) = x A + a.
    """
    weight, bias = linear.weight.double(), linear.bias.double()
    if norm.training:
        mean, covariance = moments(x)
        mean = weight @ mean + bias
        variance = ((weight @ covariance) * weight).sum(1)
        norm.count(x.numel() // x.shape[-1], mean, variance.clamp(min=0))
    else:
        mean, variance = norm.running_mean.double(), norm.running_var.double()
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    return (weight * scale.unsqueeze(1)).T, (bias - mean) * scale + norm.bias


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean, (C,), and covariance, (C, C), of the nodes of (B, N, C), in float64."""
    return _Moments.apply(x)  # pyright: ignore[reportReturnType]


class _Moments(torch.autograd.Function):
    """Mean and covariance; saves x for the backward, but nothing in double precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        rows = x.reshape(-1, x.shape[-1]).double()
        mean = rows.mean(0)
        rows = rows - mean
        ctx.save_for_backward(x, mean)
        return mean, rows.T @ rows / len(rows)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        d_mean: Tensor,
        d_covariance: Tensor,
    ) -> Tensor:
        x, mean = ctx.saved_tensors
        num_rows = x.numel() // x.shape[-1]
        factor = (d_covariance + d_covariance.T) / num_rows
        summand = d_mean / num_rows - mean @ factor
        return torch.addmm(summand.to(x), x.reshape(-1, x.shape[-1]), factor.to(x)).view_as(x)
