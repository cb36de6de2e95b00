"""Dropout and ReLU for large tensors: the backward needs a bit for each number, or nothing."""

# pyrefly: ignore-errors[bad-override]

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.ops.call import call, can_call, dtype_name, num_threads, sizes
from vigpipe.ops.splitmix import lanes_at_least


def dropped(
    x: Tensor, rows: Tensor, first: int, threshold: int, scale: float, *, fused: bool = True
) -> Tensor:
    """Multiply x, (B, C), by `scale` where a lane of a hash is at least a threshold, else by 0.

    Rows, first and threshold are those of `splitmix.lanes_at_least`. The C++ version, which `fused`
    allows, hashes again in the backward instead of keeping a mask; the bits are the same.
    """
    if fused and _has_native(x):
        return _Dropped.apply(x, rows, first, threshold, scale)
    kept = lanes_at_least(rows, first, x.shape[1], threshold, fused=fused)
    return x * kept * scale  # the backward needs `kept` alone, a byte each


def relu(x: Tensor, *, fused: bool = True) -> Tensor:
    """Return max(x, 0); the C++ version, which `fused` allows, keeps a bit of each number, not x.

    The memory of x may get the result, so nothing else may need it any more.
    """
    if fused and x.requires_grad and torch.is_grad_enabled() and _has_native(x):
        is_inner = not x.is_leaf and not x._is_view() and x.is_contiguous()
        return _Relu.apply(x, is_inner)
    return torch.relu(x)


def _has_native(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64) and can_call(x)


class _Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.options = options
        return _dropped(x, rows, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _dropped(grad, rows, *ctx.options), None, None, None, None


def _dropped(x: Tensor, rows: Tensor, first: int, threshold: int, scale: float) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    shape, threads = sizes(first, threshold, *x.shape), num_threads(x.numel())
    name = f"dropped_{dtype_name(x)}"
    call(name, rows.contiguous(), x.contiguous(), y, scale, *shape, threads)
    return y


class _Relu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        y = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)  # each byte is of eight numbers
        shape, threads = sizes(x.numel()), num_threads(x.numel())
        call(f"relu_{dtype_name(x)}", x.contiguous(), y, bits, *shape, threads)
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(bits)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        d_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
        shape, threads = sizes(grad.numel()), num_threads(grad.numel())
        call(f"relu_backward_{dtype_name(grad)}", grad.contiguous(), bits, d_x, *shape, threads)
        return d_x, None
