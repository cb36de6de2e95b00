"""Aggregation of neighbour features over a graph given as indices.

Everywhere: x (B, N, C) are the nodes, y (B, M, C) the nodes that the graph's indices mean (None: x
itself, as where neighbours are not pooled), graph (B, N, K) int64.
"""

from torch import Tensor

from vigpipe import ops
from vigpipe.model.regions import region
from vigpipe.ops.plain import rows_of


def neighbours(y: Tensor, graph: Tensor) -> Tensor:
    """Every node's neighbours: (B, M, C), (B, N, K) -> (B, N, K, C)."""
    return region("aggregation", _gathered, y, graph)


def relative(
    x: Tensor, graph: Tensor, y: Tensor | None, mode: str, *, fused: bool = True
) -> Tensor:
    """X and, in the place behind each channel, its maximum or mean over neighbours less itself.

    The max-relative aggregation of Li et al. 2019 (arXiv:1904.03751), equation 5, interleaved as
    published weights of ViG expect: [x0, m0, x1, m1, ...].

    Args:
        x: nodes.
        graph: their neighbours.
        y: candidates.
        mode: `max`, or `max_mean` for both.
        fused: take the fused operator where there is one.

    Returns:
        (B, N, 2C), or (B, N, 3C) for both.
    """
    return region("aggregation", _aggregated, x, y, graph, mode, True, fused)


def neighbour_sum(y: Tensor, graph: Tensor, *, fused: bool = True) -> Tensor:
    """Sum of y_j over the neighbours j of every node: (B, M, C), (B, N, K) -> (B, N, C)."""
    return region("aggregation", _aggregated, None, y, graph, "sum", False, fused)


def _aggregated(
    x: Tensor | None, y: Tensor | None, graph: Tensor, mode: str, interleave: bool, fused: bool
) -> Tensor:
    return ops.aggregate(x, y, graph, None, mode, interleave, fused=fused)


def _gathered(y: Tensor, graph: Tensor) -> Tensor:
    table, rows = rows_of(y, graph)
    return table[rows].view(*graph.shape, -1)
