"""The graph of nearest neighbours in feature space."""

from contextlib import nullcontext

import torch
from torch import Tensor

from vigpipe.errors import InputError


def check_neighbours(k: int, dilation: int, num_nodes: int, loop: bool = True) -> None:
    """Raise InputError when a node has fewer candidates than k * dilation."""
    candidates = num_nodes if loop else num_nodes - 1
    if k < 1 or dilation < 1 or k * dilation > candidates:
        raise InputError(
            f"kNN graph: k * dilation = {k} * {dilation} = {k * dilation} neighbours of "
            f"{candidates} candidates (N = {num_nodes} nodes"
            f"{'' if loop else ', a node is not its own neighbour'}); "
            "take larger images or a smaller --stem-stride"
        )


def fitting(k: int, dilation: int, num_candidates: int) -> tuple[int, int]:
    """K and dilation, lowered until k * dilation candidates exist: k first, then dilation."""
    k = min(k, num_candidates)
    return k, min(dilation, num_candidates // k)


def check_finite(x: Tensor, block: str) -> None:
    """Raise FloatingPointError if a node of (B, N, C) has a NaN or an infinite feature."""
    bad = ~x.isfinite().all(-1)  # (B, N)
    if bad.any():
        raise FloatingPointError(
            f"{block}: {int(bad.sum())} of {bad.numel()} nodes, in {int(bad.any(1).sum())} of "
            f"{len(bad)} images, have NaN or infinite features before the graph is made; look for "
            "the cause in the block before, lower --lr, or bound the gradient with --clip 1"
        )


@torch.no_grad()
def knn_graph(
    x: Tensor,
    k: int,
    dilation: int = 1,
    loop: bool = True,
    candidates: Tensor | None = None,
    bias: Tensor | None = None,
    ranks: Tensor | None = None,
) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first.

    Features are scaled to unit length first, as in ViG: Han et al. 2022 (arXiv:2206.00272), section
    3.1 and its reference code. Dilation: Li et al. 2019 (arXiv:1904.03751).

    Of equally near candidates the one with the lowest index comes first, on every device. A zero
    vector stays one: at distance 0 from others of its kind, at 1 from everything else. A candidate
    with a NaN or an infinite feature (or a norm that overflows) is farther than all others; what
    neighbours such a node has itself is of no consequence, as its own features stay what they are.

    Args:
        x: node features, (B, N, C), floating point; gradients do not flow through the choice. Half
            precision is widened: distances are taken in float32 or float64.
        k: neighbours per node.
        dilation: keep every dilation-th of the k * dilation nearest.
        loop: a node may be its own neighbour; it is at distance zero, so usually the first.
        candidates: (B, M, C) to choose from; by default the nodes themselves, M = N.
        bias: added to the squared distances, broadcast to (B, N, M).
        ranks: (B, K) int64, ranks to keep of the k * dilation nearest in place of every
            dilation-th, for each image.

    Returns:
        (B, N, K) int64.

    Raises:
        InputError: k * dilation exceeds M (or M - 1 without loop); the message gives all three.
    """
    others = x if candidates is None else candidates
    check_neighbours(k, dilation, others.shape[1], loop)
    # The meta device knows no autocast.
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        x, is_finite = _unit_length(x)
        others, is_finite = (x, is_finite) if candidates is None else _unit_length(others)
        # -|x_i - x_j|^2 up to |x_i|^2, which is the same for all candidates j of node i.
        squares = others.square().sum(-1).masked_fill(~is_finite, torch.inf)  # (B, M)
        nearness = torch.baddbmm(
            -squares.unsqueeze(1), x, others.transpose(1, 2), alpha=2.0
        )  # (B, N, M)
        if bias is not None:
            nearness = nearness - bias
        if not loop:
            nearness.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        chosen = nearest(nearness, k * dilation)
    if ranks is None:
        return chosen[..., ::dilation]
    return chosen.gather(2, ranks.unsqueeze(1).expand(-1, chosen.shape[1], -1))


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
