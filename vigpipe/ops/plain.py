"""The operators in plain torch, used where there is no fused one and as the reference in tests.

They run on every device and dtype, through torch.compile and ONNX, with torch's own gradients.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2048  # rows whose hidden layer stays in a processor's cache
# Numbers of a hidden layer that a GPU's memory holds at the same time: 128 MiB in float32.
_GPU_NUMBERS = 1 << 25


@torch.no_grad()
def knn(
    x: Tensor, y: Tensor | None, bias: Tensor | None, k: int, dilation: int, loop: bool
) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first; see `vigpipe.ops.knn`."""
    # The meta device has no autocast.
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        x, is_finite = _unit_length(x)
        others, is_finite = (x, is_finite) if y is None else _unit_length(y)
        # -|x_i - x_j|^2 up to |x_i|^2, which is the same for all candidates j of node i.
        squares = others.square().sum(-1).masked_fill(~is_finite, torch.inf)  # (B, M)
        nearness = torch.baddbmm(
            -squares.unsqueeze(1), x, others.transpose(1, 2), alpha=2.0
        )  # (B, N, M)
        if bias is not None:
            nearness = nearness - bias
        if not loop:
            nearness.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        return nearest(nearness, (k - 1) * dilation + 1)[..., ::dilation]


def _unit_length(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x if x.dtype == torch.float64 else x.float()
    return unit_length(x, x.norm(dim=-1, keepdim=True))


def unit_length(x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Divide vectors by their lengths, and tell which of these were finite; other vectors become 0.

    The vectors, or some of their channels, are (B, N, C) float32 or float64, the lengths of whole
    vectors (B, N, 1); the results are (B, N, C), and (B, N) bool.
    """
    is_finite = length.isfinite()
    x = (x / length.clamp(min=1e-12)).masked_fill(~is_finite, 0)
    return x, is_finite.squeeze(-1)


def nearest(nearness: Tensor, num: int) -> Tensor:
    """Index the `num` largest numbers of every row, largest first, equal ones by index.

    From nearness, (B, N, M) float32 or float64 without NaN, it makes (B, N, num) int64.

    topk returns equal numbers in any order. On the CPU, rows with equal numbers are rare, and are
    sorted again. On other devices, looking for such rows would make the host wait for the device.
    There the index becomes part of the key: the bits of the float32, as an integer of the same
    order, above the negated index.
    """
    if torch.onnx.is_in_onnx_export():  # ONNX's TopK puts the lower index first
        return nearness.topk(num, dim=-1).indices
    if nearness.device.type == "cpu" and not torch.compiler.is_compiling():
        num_candidates = nearness.shape[-1]
        values, indices = nearness.topk(min(num + 1, num_candidates), dim=-1)
        has_tie = (values[..., 1:] == values[..., :-1]).any(-1)  # (B, N)
        indices = indices[..., :num]
        if has_tie.any():
            rows = nearness[has_tie].sort(dim=-1, descending=True, stable=True).indices
            indices[has_tie] = rows[..., :num]
        return indices
    if nearness.dtype != torch.float32:
        return nearness.sort(dim=-1, descending=True, stable=True).indices[..., :num]
    bits = (nearness + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    last = nearness.shape[-1] - 1
    key = order | torch.arange(last, -1, -1, device=nearness.device)
    return last - (key.topk(num, dim=-1).values & 0xFFFFFFFF)


def candidates_of(x: Tensor | None, y: Tensor | None) -> Tensor:
    """Return y; or x, the nodes, where these are the candidates themselves."""
    candidates = x if y is None else y
    assert candidates is not None, "neither nodes nor candidates"
    return candidates


def aggregate(
    x: Tensor | None,
    y: Tensor | None,
    graph: Tensor,
    weights: Tensor | None,
    mode: str,
    interleave: bool,
) -> Tensor:
    """Reduce the features of every node's neighbours; see `vigpipe.ops.aggregate`."""
    others = candidates_of(x, y)
    if mode == "sum":
        outputs = [_reduced(others, graph, "sum", weights)]
    else:
        # Rounding is monotone, so max_j(y_j - x_i) is (max_j y_j) - x_i to the last bit.
        outputs = [_reduced(others, graph, reduction) for reduction in mode.split("_")]
        outputs = outputs if x is None else [output - x for output in outputs]
    if interleave:
        assert x is not None
        outputs = [x, *outputs]
    return outputs[0] if len(outputs) == 1 else torch.stack(outputs, dim=-1).flatten(2)


def rows_of(y: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten the images: a table of all nodes, (B*M, C), and neighbours as its rows, (B*N, K)."""
    num_images, num_nodes, num_channels = y.shape
    offsets = torch.arange(num_images, device=y.device).mul_(num_nodes).view(-1, 1, 1)
    return y.reshape(-1, num_channels), (graph + offsets).flatten(0, 1)


def _reduced(y: Tensor, graph: Tensor, mode: str, weights: Tensor | None = None) -> Tensor:
    table, rows = rows_of(y, graph)
    if torch.compiler.is_exporting() or weights is not None:  # ONNX has no embedding_bag of maxima
        gathered = table[rows]
        if weights is not None:
            gathered = gathered * weights.flatten(0, 1).unsqueeze(-1)
        reduced = gathered.amax(1) if mode == "max" else getattr(gathered, mode)(1)
        return reduced.view(*graph.shape[:2], y.shape[2])
    # embedding_bag reduces the K rows while it reads them, without a (B, N, K, C) tensor.
    table = table.float() if table.dtype in (torch.bfloat16, torch.float16) else table
    return F.embedding_bag(rows, table, mode=mode).view(*graph.shape[:2], y.shape[2]).to(y.dtype)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    sample_scale: Tensor | None,
    eps: float,
    gelu: bool,
    before: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply BatchNorm, then GELU and a residual; see `vigpipe.ops.norm`."""
    rows = x.reshape(-1, x.shape[-1])
    if before is not None:
        bias = torch.add(bias, before, alpha=0)  # the same numbers, and a gradient of zeros
    # Momentum 1 turns "running" statistics into this batch's own mean and unbiased variance.
    mean, variance = weight.detach().new_zeros(2, len(weight)).unbind()
    y = torch.batch_norm(
        rows, weight, bias, mean, variance, True, 1.0, eps, torch.backends.cudnn.enabled
    )
    if len(rows) <= 1:  # the unbiased variance of one row is 0/0
        variance = torch.zeros_like(variance)
    variance = variance.double() * ((len(rows) - 1) / max(len(rows), 1))
    return finished(y.view(x.shape), residual, sample_scale, gelu), mean.double(), variance


def finished(y: Tensor, residual: Tensor | None, sample_scale: Tensor | None, gelu: bool) -> Tensor:
    """Apply what follows a norm: GELU, factors of the samples, (B,), and a residual of y's shape.

    The output of the norm, y (B, ..., C), may be changed in place.
    """
    # Works in place if nothing is saved for a backward, since nothing else uses y.
    is_eager = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if gelu:
        y = torch.ops.aten.gelu_(y) if is_eager else F.gelu(y)
    if residual is None:
        return y
    if sample_scale is not None:
        y = y * sample_scale.to(y.dtype).view(-1, *[1] * (y.dim() - 1))
    return y.add_(residual) if is_eager and y.dtype == residual.dtype else residual + y


def grouped(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Multiply each group of channels by its own matrix; see `vigpipe.ops.grouped`."""
    rows = x.unflatten(1, (groups, -1)).transpose(0, 1)  # (G, R, C_in / G)
    weight = weight.unflatten(0, (groups, -1)).transpose(1, 2)  # (G, C_in / G, C_out / G)
    return torch.bmm(rows, weight).transpose(0, 1).flatten(1)


def hidden(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """Compute gelu(x first + bias) second^T; see `vigpipe.ops.hidden`."""
    return _Hidden.apply(x, first, bias, second)


def rows_at_once(device_type: str, width: int) -> int:
    """Choose how many rows of a hidden layer of H = `width` channels to compute at a time.

    A GPU has no cache for a hidden layer, and small products leave most of it idle. So there only
    the memory that the rows take together counts.
    """
    return CHUNK if device_type == "cpu" else max(CHUNK, _GPU_NUMBERS // width)


class _Hidden(torch.autograd.Function):
    """Compute the hidden layer for some rows at a time, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, bias, second)
        chunks = x.split(rows_at_once(x.device.type, first.shape[1]))
        return torch.cat(
            [F.linear(F.gelu(torch.addmm(bias, rows, first)), second) for rows in chunks]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]
        x, first, bias, second = ctx.saved_tensors
        d_x: list[Tensor] = []
        d_first, d_bias, d_second = (torch.zeros_like(t) for t in (first, bias, second))
        num_rows = rows_at_once(x.device.type, first.shape[1])
        for rows, dy in zip(x.split(num_rows), grad.split(num_rows), strict=True):
            z = torch.addmm(bias, rows, first)
            d_second.addmm_(dy.T, F.gelu(z))
            dz = torch.ops.aten.gelu_backward(dy @ second, z)
            d_bias += dz.sum(0)
            d_first.addmm_(rows.T, dz)
            d_x.append(dz @ first.T)
        return torch.cat(d_x), d_first, d_bias, d_second


_LEAST_TEMPERATURE = 1e-6  # added to the temperature of a gate, as the published code does


def axial(
    x: Tensor,
    links: Sequence[tuple[int, int, bool]],
    sign: int,
    limit: Tensor | None,
    temperature: Tensor | None,
) -> Tensor:
    """Take the largest relative feature of the nodes linked to; see `vigpipe.ops.axial`."""
    largest = torch.zeros_like(x)
    for axis, shift, gated in links:
        relative = x.roll(shift, 1 + axis) - x if sign > 0 else x - x.roll(shift, 1 + axis)
        if gated:
            distance = _length(relative)
            if temperature is not None:
                gate = torch.exp(-distance / (temperature.abs() + _LEAST_TEMPERATURE))
            else:
                assert limit is not None
                gate = distance < limit.view(-1, 1, 1, 1)
            relative = relative * gate.to(x.dtype)
        largest = torch.maximum(largest, relative)
    return largest


def axial_far(x: Tensor) -> Tensor:
    """Measure the L1 distance of each node to the one half a grid away: (B, H, W, C) -> (B, N)."""
    far = x.roll(((x.shape[1] + 1) // 2, (x.shape[2] + 1) // 2), (1, 2))
    return _length(x - far).flatten(1)


def _length(relative: Tensor) -> Tensor:
    """Return L1 lengths, (..., 1), of (..., C); those of half precision are float32."""
    wide = torch.promote_types(relative.dtype, torch.float32)
    return relative.abs().sum(-1, keepdim=True, dtype=wide)
