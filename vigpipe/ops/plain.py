"""The operators in plain torch: what the fused ones are tested against, and serve without them.

They run on every device and dtype, through torch.compile and ONNX, and have torch's own gradients.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2048  # rows whose hidden layer exists at one time


@torch.no_grad()
def knn(
    x: Tensor, y: Tensor | None, bias: Tensor | None, k: int, dilation: int, loop: bool
) -> Tensor:
    """See `vigpipe.ops.knn`."""
    # The meta device knows no autocast.
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
    """Features of unit length, 0 in place of vectors without a finite length, and which have one.

    (B, N, C) -> (B, N, C), (B, N).
    """
    x = x if x.dtype == torch.float64 else x.float()
    norm = x.norm(dim=-1, keepdim=True)
    is_finite = norm.isfinite()
    x = (x / norm.clamp(min=1e-12)).masked_fill(~is_finite, 0)
    return x, is_finite.squeeze(-1)


def nearest(nearness: Tensor, num: int) -> Tensor:
    """Indices of the largest numbers of every row, largest first, equal ones by index.

    topk gives equal numbers in any order. On the CPU, rows in which that may show are rare and
    sorted once more; elsewhere looking for them would hold up the device, and the index goes into
    the key: the bits of a float32, as an integer of the same order, above the negated index.

    Args:
        nearness: (B, N, M) float32 or float64, no NaN.
        num: at most M.

    Returns:
        (B, N, num) int64.
    """
    if torch.onnx.is_in_onnx_export():  # ONNX defines its TopK so: of equals, the lower index first
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
    bits = (nearness + 0.0).view(torch.int32)  # + 0.0 makes one of the two zeros
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    last = nearness.shape[-1] - 1
    key = order | torch.arange(last, -1, -1, device=nearness.device)
    return last - (key.topk(num, dim=-1).values & 0xFFFFFFFF)


def aggregate(
    x: Tensor | None,
    y: Tensor | None,
    graph: Tensor,
    weights: Tensor | None,
    mode: str,
    interleave: bool,
) -> Tensor:
    """See `vigpipe.ops.aggregate`."""
    others = x if y is None else y
    assert others is not None
    if mode == "sum":
        pieces = [_reduced(others, graph, "sum", weights)]
    else:
        # Rounding is monotone, so max_j(y_j - x_i) is (max_j y_j) - x_i to the last bit.
        pieces = [_reduced(others, graph, piece) for piece in mode.split("_")]
        pieces = pieces if x is None else [piece - x for piece in pieces]
    if interleave:
        assert x is not None
        pieces = [x, *pieces]
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces, dim=-1).flatten(2)


def rows_of(y: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
    """All images' nodes as a table (B*M, C), each node's neighbours as rows of it (B*N, K)."""
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
    # embedding_bag reduces the K rows while reading them: no (B, N, K, C) tensor is made.
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
) -> tuple[Tensor, Tensor, Tensor]:
    """See `vigpipe.ops.norm`."""
    rows = x.reshape(-1, x.shape[-1])
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
    """What follows a norm: GELU, and a residual to which each sample is added with its strength."""
    # In place where nothing has to be kept: y is nobody else's.
    is_eager = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if gelu:
        y = torch.ops.aten.gelu_(y) if is_eager else F.gelu(y)
    if residual is None:
        return y
    if sample_scale is not None:
        y = y * sample_scale.to(y.dtype).view(-1, *[1] * (y.dim() - 1))
    return y.add_(residual) if is_eager and y.dtype == residual.dtype else residual + y


def hidden(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """See `vigpipe.ops.hidden`."""
    return _Hidden.apply(x, first, bias, second)  # pyright: ignore[reportReturnType]


class _Hidden(torch.autograd.Function):
    """The hidden layer of some rows at a time, in the backward once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, first, bias, second)
        pieces = [
            F.linear(F.gelu(torch.addmm(bias, rows, first)), second) for rows in x.split(CHUNK)
        ]
        return torch.cat(pieces)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor, ...]:
        x, first, bias, second = ctx.saved_tensors
        d_x: list[Tensor] = []
        d_first, d_bias, d_second = (torch.zeros_like(t) for t in (first, bias, second))
        for rows, dy in zip(x.split(CHUNK), grad.split(CHUNK), strict=True):
            z = torch.addmm(bias, rows, first)
            d_second.addmm_(dy.T, F.gelu(z))
            dz = torch.ops.aten.gelu_backward(dy @ second, z)
            d_bias += dz.sum(0)
            d_first.addmm_(rows.T, dz)
            d_x.append(dz @ first.T)
        return torch.cat(d_x), d_first, d_bias, d_second
