"""The kNN graph: every node's nearest neighbours in feature space."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vigpipe import ops
from vigpipe.errors import InputError


def check_neighbours(k: int, dilation: int, num_nodes: int, loop: bool = True) -> None:
    """Raise InputError unless there are k * dilation candidates; with `loop` a node is its own."""
    candidates = num_nodes if loop else num_nodes - 1
    if k < 1 or dilation < 1 or k * dilation > candidates:
        raise InputError(
            f"kNN graph: k * dilation = {k} * {dilation} = {k * dilation} neighbours of "
            f"{candidates} candidates (N = {num_nodes} nodes"
            f"{'' if loop else ', a node is not its own neighbour'}); "
            "take larger images or a smaller --stem-stride"
        )


def reduce_k(k: int, dilation: int, num_candidates: int) -> tuple[int, int]:
    """Lower k, and then dilation, until there are k * dilation candidates; return both."""
    k = min(k, num_candidates)
    return k, min(dilation, num_candidates // k)


_collected: list[str] | None = None  # what `collected_anomalies` yields; None outside its block


@contextmanager
def collected_anomalies() -> Iterator[list[str]]:
    """Make `report_anomaly` add messages to a list, not raise, inside the with-block."""
    global _collected
    _collected = messages = []
    try:
        yield messages
    finally:
        _collected = None


def report_anomaly(message: str) -> None:
    """Raise FloatingPointError with this message, or collect it; see `collected_anomalies`."""
    if _collected is None:
        raise FloatingPointError(
            f"{message}; look for the cause in the block before, in a first step also in the "
            "input; later lower --lr, or bound the gradient with --clip 1"
        )
    _collected.append(message)


def check_finite(x: Tensor, block: str) -> None:
    """Raise FloatingPointError if a node of (B, N, C) has a NaN or an infinite feature."""
    bad = ~x.isfinite().all(-1)  # (B, N)
    if bad.any():
        report_anomaly(
            f"{block}: {int(bad.sum())} of {bad.numel()} nodes, in {int(bad.any(1).sum())} of "
            f"{len(bad)} images, have NaN or infinite features before the graph is made"
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
    fused: bool = True,
) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first.

    Features are scaled to unit length first, as in ViG: Han et al. 2022 (arXiv:2206.00272), section
    3.1 and its reference code. Dilation: Li et al. 2019 (arXiv:1904.03751).

    Of equally near candidates the one with the lowest index comes first, on every device. A zero
    vector stays zero: it is at distance 0 from other zero vectors and at distance 1 from everything
    else. A candidate with a NaN or an infinite feature (or a norm that overflows) is farther than
    all others; which neighbours such a node has itself does not matter, because its own features
    stay NaN or infinite.

    Args:
        x: node features, (B, N, C), floating point; gradients do not flow through the choice. Half
            precision is widened: distances are computed in float32 or float64.
        k: neighbours per node.
        dilation: keep every dilation-th of the k * dilation nearest.
        loop: a node may be its own neighbour; it is at distance zero, so usually the nearest.
        candidates: nodes to choose from, (B, M, C); by default the nodes themselves, M = N.
        bias: added to the squared distances, broadcast to (B, N, M).
        ranks: for each image, which of the k * dilation nearest to keep instead of every
            dilation-th, (B, K) int64.
        fused: use the fused operator where there is one.

    Returns:
        (B, N, K) int64.

    Raises:
        InputError: k * dilation exceeds M (or M - 1 without loop); the message gives all three.
    """
    others = x if candidates is None else candidates
    check_neighbours(k, dilation, others.shape[1], loop)
    if ranks is None:
        return ops.knn(x, candidates, bias, k, dilation, loop, fused=fused)
    chosen = ops.knn(x, candidates, bias, k * dilation, 1, loop, fused=fused)
    return chosen.gather(2, ranks.unsqueeze(1).expand(-1, chosen.shape[1], -1))
