"""Half a block of vig_study in training, in one call each for forward and backward.

It computes what `vigpipe.ops.folded` and a second norm compute one after the other. A micro-batch
of few images takes longer to call functions than to compute.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vigpipe.ops.call import call, can_call, num_threads
from vigpipe.ops.double_sum import DoubleSum, sum_of

CHANNELS = 3  # numbers of a node
FEATURES = 7  # numbers of a node that a folded convolution takes
_MATRICES = (4, 6)  # positions of rel and root, whose gradients have rank 4, among the parameters
_OTHERS = (0, 1, 2, 3, 5, 7, 8, 9, 10)


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "height", "width", "hidden")),
        *((name, ctypes.c_int) for name in ("threads", "many")),
    )


@dataclass(frozen=True)
class Settings:
    """What half a block has besides parameters."""

    grid: tuple[int, int]  # height and width in nodes
    eps: tuple[float, float]  # of the first norm and of the second
    # For each norm, the list that the micro-batch's statistics go to, (n, 3, channels) float64, and
    # its length, a scalar int64, which is raised by one.
    stats: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def can_run(x: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """Tell whether there is a fused half-block for nodes (B, N, 3) and these parameters.

    It is not an operator of torch, so there must be no compiler and no counter of FLOPs around.
    """
    if torch.compiler.is_compiling():
        return False
    given = [p for p in parameters if p is not None]
    second = parameters[7]
    assert second is not None
    return (
        x.shape[2] == CHANNELS
        and second.shape[0] == CHANNELS
        and second.shape[1] % 16 == 0
        and x.numel() > 0
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in (x, *given))
        and torch.is_grad_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and can_call(x)
    )


def half_block(
    x: Tensor,
    sample_scale: Tensor | None,
    parameters: Sequence[Tensor | None],
    settings: Settings,
) -> Tensor:
    """Compute x + norm(gelu(conv(norm(W x + b))) second^T + c) for nodes (B, N, 3).

    The sample scale is that of `vigpipe.ops.norm`. The parameters are weight (H, 3) and bias of the
    first Linear, weight and bias of its norm; rel (H, H), bias and root (H, H) of the convolution,
    None without one; second (3, H) and its bias c, weight and bias of its norm.
    """
    scale = None if sample_scale is None else sample_scale.to(x).contiguous()
    sums = _sums(parameters)
    if sums is None:
        return _HalfBlock.apply(x, scale, settings, None, *parameters)
    if not x.requires_grad:  # without any such input there would be no backward
        x = x.detach().requires_grad_()
    held = _Held(tuple(parameters), sums)
    return _HalfBlock.apply(x, scale, settings, held)


@dataclass(frozen=True)
class _Held:
    """Parameters whose gradients are added to sums by the backward itself.

    autograd does not see them: for each it would visit a node that has nothing to do.
    """

    parameters: tuple[Tensor | None, ...]
    sums: list[DoubleSum | None]


class _HalfBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sample_scale: Tensor | None,
        settings: Settings,
        held: _Held | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        given = parameters if held is None else held.parameters
        ctx.settings, ctx.held, ctx.shape = settings, held, _shape(x, given, settings)
        num_hidden, has_conv = ctx.shape.hidden, given[4] is not None
        z, out = torch.empty_like(x), torch.empty_like(x)
        kept = x.new_empty(((FEATURES if has_conv else CHANNELS) + 1) * num_hidden)
        moments = torch.empty(6, CHANNELS, dtype=torch.float64)
        lists = (*settings.stats[0], *settings.stats[1])
        results = (z, out, kept, moments, *lists, ctypes.byref(ctx.shape))
        call("half_block", x, _addresses(given), *settings.eps, sample_scale, *results)
        ctx.save_for_backward(x, sample_scale, z, kept, moments, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, sample_scale, z, kept, moments, *parameters = ctx.saved_tensors
        addresses = _addresses(parameters if ctx.held is None else ctx.held.parameters)
        first = (grad.contiguous(), x, addresses, *ctx.settings.eps, sample_scale)
        given = (*first, z, kept, moments)
        d_x = torch.empty_like(x)
        if ctx.held is not None:
            _add_to_sums(ctx.held, given, d_x, ctx.shape)
            return d_x, None, None, None
        lengths = [p.numel() for i in _OTHERS if (p := parameters[i]) is not None]
        values = x.new_empty(sum(lengths))
        others, grads = iter(values.split(lengths)), []
        for i, p in enumerate(parameters):
            if p is None:
                grads.append(None)
            else:
                grads.append(torch.empty_like(p) if i in _MATRICES else next(others).view_as(p))
        d_matrices = [grads[i] for i in _MATRICES]
        results = (d_x, values, None, None, *d_matrices, None, ctypes.byref(ctx.shape))
        call("half_block_backward", *given, *results)
        return d_x, None, None, None, *grads


def _add_to_sums(held: _Held, given: tuple[Any, ...], d_x: Tensor, shape: _Shape) -> None:
    """Run the backward with the arguments `given`: fill d_x, and add to the parameters' sums."""
    others = [held.sums[i] for i in _OTHERS]
    matrices = [s for i in _MATRICES if (s := held.sums[i]) is not None]
    values = d_x.new_empty(sum(s.total.numel() for s in others if s is not None))
    addresses = _addresses([None if s is None else s.total for s in others])
    are_first = (ctypes.c_int * len(others))(*(s is None or s.is_empty for s in others))
    factors = torch.empty(3, CHANNELS + 1, shape.hidden, dtype=torch.float64) if matrices else None
    results = (d_x, values, addresses, are_first, None, None, factors, ctypes.byref(shape))
    call("half_block_backward", *given, *results)
    for double_sum in others:
        if double_sum is not None:
            double_sum.is_empty = False
    for i, double_sum in enumerate(matrices):
        assert factors is not None
        double_sum.add_product(factors[i], factors[2])


def _sums(parameters: Sequence[Tensor | None]) -> list[DoubleSum | None] | None:
    """Return the sums that are offered for parameters; None if one parameter has none."""
    sums = [None if p is None else sum_of(p) for p in parameters]
    is_offered = all(p is None or s is not None for s, p in zip(sums, parameters, strict=True))
    return sums if is_offered else None


def _shape(x: Tensor, parameters: Sequence[Tensor | None], settings: Settings) -> _Shape:
    second = parameters[7]
    assert second is not None
    rows, hidden = x.shape[0] * x.shape[1], second.shape[1]
    threads = num_threads(x.numel()), num_threads(rows * hidden)
    return _Shape(x.shape[0], *settings.grid, hidden, *threads)


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Make an array of addresses, which the caller's tensors must outlive."""
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    return (ctypes.c_void_p * len(tensors))(*pointers)
