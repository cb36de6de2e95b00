"""Linear and BatchNorm of few channels, folded into one affine map whose statistics are exact.

W x + b of C-channel features x has the mean W m + b and the variances diag(W S W^T), m and S being
mean and covariance of x: a C x C matrix tells what BatchNorm would measure on hundreds of channels.
So BN(W x + b) = A^T x + a with A, a of the weights, m and S alone, and gradients flow through both.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vigpipe.model.norm import BatchNorm


def folded(x: Tensor, linear: nn.Linear, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """The affine map that `norm(linear(x))` is; in training it counts x as the norm would.

    Args:
        x: (B, N, C).
        linear: C to H channels, with a bias.
        norm: of H channels.

    Returns:
        A (C, H) and a (H,), float64: BN(W x + b) = x A + a.
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
    """Mean (C,) and covariance (C, C) of the rows of (B, N, C), float64."""
    return _Moments.apply(x)  # pyright: ignore[reportReturnType]


class _Moments(torch.autograd.Function):
    """Keeps x for the backward, and nothing in double precision."""

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
