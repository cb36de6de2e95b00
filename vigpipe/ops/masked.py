"""Dropout and ReLU for large tensors: the backward needs a bit for each number, or nothing."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.ops import native
from vigpipe.ops.call import can_call
from vigpipe.ops.splitmix import lanes_at_least


def dropped(
    x: Tensor, rows: Tensor, first: int, threshold: int, scale: float, *, fused: bool = True
) -> Tensor:
    """Multiply x, (B, C), by `scale` where a lane of a hash is at least a threshold, else by 0.

    Rows, first and threshold are those of `splitmix.lanes_at_least`. The C++ version, which `fused`
    allows, hashes again in the backward instead of keeping a mask; the bits are the same.
    """
    if fused and _has_native(x):
        return _Dropped.apply(x, rows, first, threshold, scale)  # pyright: ignore[reportReturnType]
    kept = lanes_at_least(rows, first, x.shape[1], threshold, fused=fused)
    return x * kept * scale  # the backward needs `kept` alone, a byte each


def relu(x: Tensor, *, fused: bool = True) -> Tensor:
    """Return max(x, 0); the C++ version, which `fused` allows, keeps a bit of each number, not x.

    The memory of x may get the result, so nothing else may need it any more.
    """
    if fused and x.requires_grad and torch.is_grad_enabled() and _has_native(x):
        is_inner = not x.is_leaf and not x._is_view() and x.is_contiguous()
        return _Relu.apply(x, is_inner)  # pyright: ignore[reportReturnType]
    return torch.relu(x)


def _has_native(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64) and can_call(x)


class _Dropped(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        rows: Tensor,
        first: int,
        threshold: int,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.options = first, threshold, scale
        return native.dropped(x, rows, first, threshold, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows,) = ctx.saved_tensors
        return native.dropped(grad, rows, *ctx.options), None, None, None, None


class _Relu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:  # noqa: ANN401
        y = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        bits = native.relu(x, y)
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(bits)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (bits,) = ctx.saved_tensors
        return native.relu_backward(grad, bits), None
