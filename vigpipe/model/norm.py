"""Norms of (B, ..., C), channels last, with the parameter names of their torch.nn namesakes."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe import ops
from vigpipe.config.choices import NORMS, Norm
from vigpipe.model.recompute import is_recomputing
from vigpipe.model.slicing import Roles
from vigpipe.ops.plain import finished

# The tensors of any norm in this file: their channels have the role "out".
NORM_ROLES: Roles = {
    "weight": ("out",),
    "bias": ("out",),
    "running_mean": ("out",),
    "running_var": ("out",),
    "num_batches_tracked": (),
}


class BatchNorm(nn.Module):
    """BatchNorm over all samples and nodes, arXiv:1502.03167, for channels-last features.

    On its own it updates its running statistics at each forward, like `torch.nn.BatchNorm1d`; with
    `PooledStatistics` it stores those of each micro-batch in `pending` instead. A channel with a
    single value (one sample, after the nodes were pooled) has variance 0, so the result is the
    bias. `momentum` is the weight of the new statistics in the running ones.
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
        # Statistics of a step's micro-batches, (M, 3, C), and how many there are so far. These
        # are tensors because the length of a list would recompile the code for every micro-batch.
        self.pending: Tensor | None = None
        self.num_pending: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        sample_scale: Tensor | None = None,
        gelu: bool = False,
        before: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Normalise, then apply GELU and add a residual if asked to; see `vigpipe.ops.norm`.

        In training, `before` is the bias of the layer before, (C,), which x was made without. The
        result of the norm is multiplied by `scale`, (C,).
        """
        weight, bias = self.weight, self.bias
        if scale is not None:
            weight, bias = weight * scale, bias * scale
        if not self.training:
            rows = x.reshape(-1, x.shape[-1])
            statistics = self.running_mean, self.running_var
            y = F.batch_norm(rows, *statistics, weight, bias, eps=self.eps)
            return finished(y.view(x.shape), residual, sample_scale, gelu)
        y, mean, variance = ops.norm(
            x,
            weight,
            bias,
            residual,
            sample_scale,
            self.eps,
            gelu,
            before,
            fused=self.fused,
        )
        with torch.no_grad():
            count = x.numel() // x.shape[-1]
            mean, deviation = mean.double(), variance.double() * count
            self.record(torch.stack((torch.full_like(mean, count), mean, deviation)))
        return y

    @torch.no_grad()
    def record(self, stats: Tensor) -> None:
        """Record the statistics of a micro-batch: update the running ones now or after the step.

        `stats` are count, mean and sum of squared deviations of each channel, (3, C) float64. A
        forward that repeats an earlier one (`model.recompute`) is not counted again.
        """
        if is_recomputing():
            return
        if self.pending is None or self.num_pending is None:
            count, mean, deviation = stats
            unbiased = deviation / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
            self.num_batches_tracked += 1
        else:
            self.pending.index_copy_(0, self.num_pending, stats[None])
            self.num_pending += 1

    def next_stats(self) -> tuple[Tensor, Tensor]:
        """Return where an operator may write a micro-batch's statistics; then call `recorded`.

        That is (n, 3, C) float64, and the index below n to write at, a scalar int64, to which the
        operator adds one. IndexError if the step already has as many as were announced.
        """
        if self.pending is None or self.num_pending is None or is_recomputing():
            device = self.weight.device
            stats = torch.empty(1, 3, self.weight.numel(), dtype=torch.float64, device=device)
            return stats, torch.zeros((), dtype=torch.int64, device=device)
        if int(self.num_pending) >= len(self.pending):
            raise IndexError(f"a step has more than its {len(self.pending)} micro-batches")
        return self.pending, self.num_pending

    def recorded(self, stats: Tensor) -> None:
        """Take the statistics of a micro-batch that were written to what `next_stats` returned."""
        if stats is not self.pending:
            self.record(stats[0])

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, momentum={self.momentum}"


def fold_norm(
    weight: Tensor, bias: Tensor, norm: BatchNorm, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fold the norm that follows a linear layer, in evaluation mode, into the layer's parameters.

    BN(W x + b) = (s W) x + s (b - mean) + bias, with s = weight / sqrt(variance + eps). The norm's
    result is multiplied by `scale`, (C,), if there is one.
    """
    factor, shift = norm.weight * torch.rsqrt(norm.running_var + norm.eps), norm.bias
    if scale is not None:
        factor, shift = factor * scale, shift * scale
    shape = (-1, *[1] * (weight.dim() - 1))
    return weight * factor.view(shape), (bias - norm.running_mean) * factor + shift


@torch.no_grad()
def fold_in_place(layers: nn.Sequential, index: int = 0, scale: Tensor | None = None) -> None:
    """Fold the BatchNorm at index + 1, which becomes an Identity, into the layer at index.

    With it go the factors of its channels, `scale`, (C,), if there are any.
    """
    layer: Any = layers[index]
    norm = layers[index + 1]
    if isinstance(norm, BatchNorm):
        weight, bias = fold_norm(layer.weight, layer.bias, norm, scale)
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        layers[index + 1] = nn.Identity()


class GroupNorm(nn.GroupNorm):
    """GroupNorm, arXiv:1803.08494, over a sample's nodes and a group of channels, channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(-1, 1)).movedim(1, -1)


def apply_norm(
    norm: nn.Module,
    x: Tensor,
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Apply any norm as `BatchNorm.forward` does; only a BatchNorm does it all in one pass."""
    if isinstance(norm, BatchNorm):
        return norm(x, residual, sample_scale, gelu)
    return finished(norm(x), residual, sample_scale, gelu)


def make_norm(kind: Norm, num_channels: int) -> nn.Module:
    """Make a norm; GroupNorm has the largest number of groups up to 8 that divides the channels."""
    if kind == "batch":
        return BatchNorm(num_channels)
    if kind == "layer":
        return nn.LayerNorm(num_channels)
    if kind == "group":
        return GroupNorm(next(g for g in range(8, 0, -1) if num_channels % g == 0), num_channels)
    raise ValueError(f"unknown norm {kind!r}; choose one of {', '.join(NORMS)}")


def merge_stats(stats: Tensor) -> Tensor:
    """Merge the statistics of disjoint sets of values, in the given order: (sets, 3, C) -> (3, C).

    Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1. For
    each set, which may be empty, there is what `BatchNorm.record` takes.
    """
    count, mean, deviation = stats[0].clone()
    for other_count, other_mean, other_deviation in stats[1:]:
        weight = other_count / (count + other_count).clamp(min=1)
        delta = other_mean - mean
        deviation = deviation + other_deviation + delta**2 * (count * weight)
        mean = mean + delta * weight
        count = count + other_count
    return torch.stack((count, mean, deviation))


# Each takes many tensors in one call, because starting a kernel costs a GPU more than the update.
_lerp, _add, _zero = torch._foreach_lerp_, torch._foreach_add_, torch._foreach_zero_


class PooledStatistics:
    """BatchNorm statistics of this rank's stages, pooled over micro-batches and replicas.

    Each micro-batch is normalised with its own statistics. The running statistics are updated once
    per step with those of the global batch, so they are the same on every replica and however the
    batch is cut. All BatchNorms of the stages have the same momentum.
    """

    def __init__(self, stages: Iterable[nn.Module], num_microbatches: int) -> None:
        modules = [module for stage in stages for module in stage.modules()]
        # Those of frozen pieces keep what they have.
        self.norms = [m for m in modules if isinstance(m, BatchNorm) and m.weight.requires_grad]
        self.sizes = [norm.weight.numel() for norm in self.norms]
        self.num_channels = sum(self.sizes)
        device = next((p.device for module in modules for p in module.parameters()), None)
        numbers = {"dtype": torch.float64, "device": device}
        self._no_channels = torch.zeros(num_microbatches, 3, 0, **numbers)
        self._pending = [torch.zeros(num_microbatches, 3, size, **numbers) for size in self.sizes]
        self._counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in self.sizes]
        for norm, pending, count in zip(self.norms, self._pending, self._counts, strict=True):
            norm.pending, norm.num_pending = pending, count

    @property
    def running(self) -> list[Tensor]:
        """All running means, then all running variances."""
        return [n.running_mean for n in self.norms] + [n.running_var for n in self.norms]

    def take(self) -> Tensor:
        """Return the statistics of this step's micro-batches, and start collecting the next step's.

        They are (M, 3, channels) float64, with the channels of all norms side by side; zeros for
        micro-batches without samples, which are a step's last ones and never reach a norm.
        """
        # `cat` needs a tensor where the stages have no norms.
        stats = torch.cat((self._no_channels, *self._pending), 2)
        if self.norms:
            _zero(self._pending)
            _zero(self._counts)
        return stats

    def update(self, stats: Tensor, momentum: float | None = None) -> None:
        """Update the running statistics with those of a step on all replicas, (D * M, 3, channels).

        The momentum, the weight of the new statistics, is by default that of the norms.
        """
        if not self.norms:
            return
        momentum = self.norms[0].momentum if momentum is None else momentum
        count, mean, deviation = merge_stats(stats)
        unbiased = deviation / (count - 1).clamp(min=1)
        running = [n.running_mean for n in self.norms], [n.running_var for n in self.norms]
        for old, new in zip(running, (mean, unbiased), strict=True):
            _lerp(old, list(new.to(old[0].dtype).split(self.sizes)), momentum)
        _add([norm.num_batches_tracked for norm in self.norms], 1)
