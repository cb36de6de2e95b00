"""Normalisation, channels last: BatchNorm with pooled running statistics, LayerNorm, GroupNorm.

Every layer takes (B, ..., C) and keeps the parameter names of its torch.nn namesake.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe import ops
from vigpipe.config.choices import NORMS, Norm
from vigpipe.model.recompute import recomputing
from vigpipe.ops.plain import finished


class BatchNorm(nn.Module):
    """BatchNorm over all samples and nodes, arXiv:1502.03167, for channels-last features.

    It normalises with the statistics of the micro-batch it is given, as any BatchNorm in a pipeline
    must. Alone it moves its running statistics at each forward, like `torch.nn.BatchNorm1d`. Under
    a trainer that cuts batches, `PooledStatistics` makes it keep each micro-batch's moments in
    `pending` instead, so that the running statistics can move once a step by those of the global
    batch.

    A channel with a single value (one sample, after the nodes were pooled) has variance 0 and gives
    its bias.
    """

    fused = True
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.register_buffer("running_mean", torch.zeros(num_channels))
        self.register_buffer("running_var", torch.ones(num_channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self.pending: list[Tensor] | None = None  # (3, C) of each micro-batch

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        sample_scale: Tensor | None = None,
        gelu: bool = False,
    ) -> Tensor:
        """(B, ..., C) -> (B, ..., C); GELU and residual: see `vigpipe.ops.norm`."""
        if not self.training:
            rows = x.reshape(-1, x.shape[-1])
            kept = self.running_mean, self.running_var
            y = F.batch_norm(rows, *kept, self.weight, self.bias, eps=self.eps)
            return finished(y.view(x.shape), residual, sample_scale, gelu)
        y, mean, variance = ops.norm(
            x, self.weight, self.bias, residual, sample_scale, self.eps, gelu, fused=self.fused
        )
        self.count(x.numel() // x.shape[-1], mean, variance)
        return y

    @torch.no_grad()
    def count(self, num_rows: int, mean: Tensor, variance: Tensor) -> None:
        """Let a micro-batch move the running statistics, now or at the end of the step.

        Args:
            num_rows: samples times nodes.
            mean: (C,).
            variance: (C,), the mean squared deviation.
        """
        if recomputing():
            return
        mean, variance = mean.double(), variance.double()
        moments = torch.stack((torch.full_like(mean, num_rows), mean, variance * num_rows))
        if self.pending is None:
            self.update(*moments)
        else:
            self.pending.append(moments)

    @torch.no_grad()
    def update(self, count: Tensor, mean: Tensor, deviation: Tensor) -> None:
        """Move the running statistics once: running += momentum * (statistics - running).

        Args:
            count: (C,) rows, the same number everywhere.
            mean: (C,).
            deviation: (C,) sum of squared deviations from the mean.
        """
        unbiased = deviation / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        self.num_batches_tracked += 1

    def extra_repr(self) -> str:
        """Channels, eps and momentum."""
        return f"{self.weight.numel()}, eps={self.eps}, momentum={self.momentum}"


def folded_into(weight: Tensor, bias: Tensor, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Weights and bias of a layer such that the norm behind it, in evaluation mode, is in them.

    BN(W x + b) = (s W) x + s (b - mean) + bias, with s = weight / sqrt(variance + eps).

    Args:
        weight: (C_out, ...).
        bias: (C_out,).
        norm: of C_out channels.
    """
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    shape = (-1, *[1] * (weight.dim() - 1))
    return weight * scale.view(shape), (bias - norm.running_mean) * scale + norm.bias


@torch.no_grad()
def fold_for_good(layers: nn.Sequential, index: int = 0) -> None:
    """Fold the BatchNorm at index + 1 into the layer at index, and put an Identity in its place."""
    layer: Any = layers[index]
    norm = layers[index + 1]
    if isinstance(norm, BatchNorm):
        weight, bias = folded_into(layer.weight, layer.bias, norm)
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        layers[index + 1] = nn.Identity()


class GroupNorm(nn.GroupNorm):
    """GroupNorm, arXiv:1803.08494, over a sample's nodes and a group of channels, channels last."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, ..., C) -> (B, ..., C)."""
        return super().forward(input.movedim(-1, 1)).movedim(1, -1)


def normed(
    norm: nn.Module,
    x: Tensor,
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """A norm and what follows it, in one pass where it is a BatchNorm; see `vigpipe.ops.norm`."""
    if isinstance(norm, BatchNorm):
        return norm(x, residual, sample_scale, gelu)
    return finished(norm(x), residual, sample_scale, gelu)


def make_norm(kind: Norm, num_channels: int) -> nn.Module:
    """The layer for `kind`; groups are the largest divisor of the channels up to 8."""
    if kind == "batch":
        return BatchNorm(num_channels)
    if kind == "layer":
        return nn.LayerNorm(num_channels)
    if kind == "group":
        return GroupNorm(next(g for g in range(8, 0, -1) if num_channels % g == 0), num_channels)
    raise ValueError(f"unknown norm {kind!r}; choose one of {', '.join(NORMS)}")


def merged(moments: Tensor) -> Tensor:
    """Moments of the union of disjoint sets of rows, merged in the given order.

    Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.

    Args:
        moments: (sets, 3, C) float64: count, mean, sum of squared deviations; a set may be empty.

    Returns:
        (3, C).
    """
    count, mean, deviation = moments[0].clone()
    for other_count, other_mean, other_deviation in moments[1:]:
        share = other_count / (count + other_count).clamp(min=1)
        delta = other_mean - mean
        deviation = deviation + other_deviation + delta**2 * (count * share)
        mean = mean + delta * share
        count = count + other_count
    return torch.stack((count, mean, deviation))


class PooledStatistics:
    """BatchNorm statistics of some parts of a model, pooled over micro-batches and replicas.

    Normalising uses each micro-batch's own statistics; the running ones move once a step, by those
    of the global batch, so they are the same on every replica and for every cut of the batch.

    Args:
        parts: the modules whose BatchNorms are pooled, in order.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.norms = [m for part in parts for m in part.modules() if isinstance(m, BatchNorm)]
        self.sizes = [norm.weight.numel() for norm in self.norms]
        self.num_channels = sum(self.sizes)
        for norm in self.norms:
            norm.pending = []

    def take(self, num_microbatches: int) -> Tensor:
        """The moments of this step's micro-batches: (M, 3, channels) float64, zeros where empty."""
        if not self.norms:
            return torch.zeros(num_microbatches, 3, 0, dtype=torch.float64)
        rows: list[Tensor] = []
        for i in range(num_microbatches):
            # Micro-batches without samples are a step's last ones, and never reach a norm.
            if i < len(self.norms[0].pending or ()):
                rows.append(torch.cat([norm.pending[i] for norm in self.norms if norm.pending], 1))
            else:
                rows.append(torch.zeros_like(rows[0]) if rows else self._nothing())
        for norm in self.norms:
            norm.pending = []
        return torch.stack(rows)

    def _nothing(self) -> Tensor:
        return self.norms[0].weight.new_zeros(3, self.num_channels, dtype=torch.float64)

    def update(self, moments: Tensor) -> None:
        """Move the running statistics by the moments of all micro-batches: (D * M, 3, channels)."""
        if self.norms:
            for norm, piece in zip(self.norms, merged(moments).split(self.sizes, 1), strict=True):
                norm.update(*piece)
