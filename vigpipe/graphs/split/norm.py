"""BatchNorm over nodes that several ranks share by rows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.model.norm import BatchNorm, merge_moments
from vigpipe.parallel.shards import Shards

NORMS = "norms"  # what is sent


def shared_batch_norm(norm: BatchNorm, x: Tensor, shards: Shards, num_rows: int) -> Tensor:
    """Normalise with the statistics of the rows of all ranks, and record these.

    Each rank sends 24 bytes a channel to each other one forwards, and the sums of two gradients
    backwards.

    Args:
        norm: the norm, in training mode.
        x: the rank's rows, (n_k, C).
        shards: the ranks.
        num_rows: n, of all ranks together.

    Returns:
        (n_k, C).
    """
    moments = _moments(x.detach(), shards)
    mean, variance = moments[1], moments[2] / num_rows
    y: Any = _Normalise.apply(x, norm.weight, norm.bias, mean, variance, norm.eps, shards, num_rows)
    norm.count(num_rows, mean, variance)
    return y


def _moments(x: Tensor, shards: Shards) -> Tensor:
    """Return count, mean and sum of squared deviations over all ranks: (3, C) float64."""
    wide, num_channels = x.double(), x.shape[1]
    mean = wide.mean(0) if len(x) else wide.new_zeros(num_channels)
    count = torch.full_like(mean, len(x))
    own = torch.stack((count, mean, (wide - mean).square().sum(0)))
    return merge_moments(shards.gathered(own[None], [1] * shards.size, NORMS))


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        shards: Shards,
        num_rows: int,
    ) -> Tensor:
        ctx.shards, ctx.num_rows = shards, num_rows
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = torch.rsqrt(variance + eps).to(wide)
        normal = (x.to(wide) - mean.to(wide)) * scale
        ctx.save_for_backward(normal, scale, weight)
        return torch.addcmul(bias.to(wide), normal, weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        normal, scale, weight = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        own = torch.stack((wide.sum(0), (wide * normal).sum(0)))
        mean, slope = (ctx.shards.total(own.double(), NORMS) / ctx.num_rows).to(normal.dtype)
        d_x = (wide - mean - normal * slope) * (scale * weight.to(normal.dtype))
        d_bias, d_weight = own.to(weight.dtype)
        return d_x.to(grad.dtype), d_weight, d_bias, None, None, None, None, None
