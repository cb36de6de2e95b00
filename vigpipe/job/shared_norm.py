"""BatchNorm and GroupNorm over nodes that several ranks share by rows.

A rank sends 24 bytes for every statistic to each other one forwards, and the sums of two gradients
backwards: a statistic is that of a channel, or of a group of channels of one sample.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.model.norm import BatchNorm, GroupNorm, merge_stats
from vigpipe.parallel.shards import Shards

NORMS = "norms"  # what is sent


def shared_batch_norm(norm: BatchNorm, x: Tensor, shards: Shards) -> Tensor:
    """Normalise a rank's rows, (n_k, C), with the statistics of all ranks' rows; record these."""
    stats = _stats(x.detach(), shards)
    count, mean, deviation = stats  # the count stays on the device: nobody waits for it
    statistics = mean, deviation / count, count
    y: Any = _Normalise.apply(x, norm.weight, norm.bias, *statistics, norm.eps, shards)
    norm.record(stats)
    return y


def shared_group_norm(norm: GroupNorm, x: Tensor, shards: Shards) -> Tensor:
    """Normalise groups of channels with the statistics of the rows, (B, ..., C), of all ranks."""
    groups = x.reshape(len(x), -1, norm.num_groups, x.shape[-1] // norm.num_groups)
    values = groups.detach().transpose(1, 2).flatten(2).flatten(0, 1).T  # (n_k C / G, B G)
    count, mean, deviation = _stats(values, shards)
    each = (len(x), 1, norm.num_groups, 1)
    statistics = mean.view(each), (deviation / count).view(each), count.view(each)
    y: Any = _NormaliseGroups.apply(groups, *statistics, norm.eps, shards)
    y = y.view(x.shape)
    return y if norm.weight is None else torch.addcmul(norm.bias, y, norm.weight).to(x.dtype)


def _stats(x: Tensor, shards: Shards) -> Tensor:
    """Return count, mean and sum of squared deviations over all ranks' rows: (3, C) float64."""
    wide, num_channels = x.double(), x.shape[1]
    mean = wide.mean(0) if len(x) else wide.new_zeros(num_channels)
    count = torch.full_like(mean, len(x))
    own = torch.stack((count, mean, (wide - mean).square().sum(0)))
    return merge_stats(shards.gathered(own[None], [1] * shards.size, NORMS))


class _NormaliseGroups(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        shards: Shards,
    ) -> Tensor:
        ctx.shards, ctx.dtype = shards, x.dtype
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = torch.rsqrt(variance + eps).to(wide)
        normal = (x.to(wide) - mean.to(wide)) * scale
        ctx.save_for_backward(normal, scale, count)
        return normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        normal, scale, count = ctx.saved_tensors
        own = torch.stack((grad, grad * normal)).double().sum((2, 4), keepdim=True)
        mean, slope = (ctx.shards.total(own, NORMS) / count).to(normal.dtype)
        d_x = (grad - mean - normal * slope) * scale
        return d_x.to(ctx.dtype), None, None, None, None, None


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        shards: Shards,
    ) -> Tensor:
        ctx.shards = shards
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = torch.rsqrt(variance + eps).to(wide)
        normal = (x.to(wide) - mean.to(wide)) * scale
        ctx.save_for_backward(normal, scale, weight, count)
        return torch.addcmul(bias.to(wide), normal, weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        normal, scale, weight, count = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        own = torch.stack((wide.sum(0), (wide * normal).sum(0)))
        mean, slope = (ctx.shards.total(own.double(), NORMS) / count).to(normal.dtype)
        d_x = (wide - mean - normal * slope) * (scale * weight.to(normal.dtype))
        d_bias, d_weight = own.to(weight.dtype)
        return d_x.to(grad.dtype), d_weight, d_bias, None, None, None, None, None
