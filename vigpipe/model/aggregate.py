"""Aggregation of neighbour features over a graph given as indices.

In every function, x are the nodes, (B, N, C); y are the candidates that the graph's indices refer
to, (B, M, C), or None for x itself; graph is (B, N, K) int64.
"""

from torch import Tensor

from vigpipe import ops
from vigpipe.model.regions import region
from vigpipe.ops.plain import rows_of


def neighbours(y: Tensor, graph: Tensor) -> Tensor:
    """Gather the features of every node's neighbours: (B, M, C), (B, N, K) -> (B, N, K, C)."""
    return region("aggregation", _gathered, y, graph)


def relative(
    x: Tensor, graph: Tensor, y: Tensor | None, mode: str, *, fused: bool = True
) -> Tensor:
    """Interleave the nodes' features with the maximum or mean of y_j - x_i over the neighbours j.

    Max-relative aggregation: Li et al. 2019 (arXiv:1904.03751), equation 5. Interleaved as the
    published weights of ViG expect: [x0, m0, x1, m1, ...].

    Args:
        x: nodes, (B, N, C).
        graph: indices of each node's neighbours in y, (B, N, K) int64.
        y: candidates, (B, M, C); None for the nodes themselves.
        mode: `max`, or `max_mean` for maximum and mean.
        fused: use the fused operator where there is one.

    Returns:
        (B, N, 2C), or (B, N, 3C) with `max_mean`.
    """
    return region("aggregation", _aggregated, x, y, graph, mode, True, fused)


def neighbour_sum(y: Tensor, graph: Tensor, *, fused: bool = True) -> Tensor:
    """Sum y_j over the neighbours j of every node.

    Args:
        y: candidates, (B, M, C).
        graph: indices of each node's neighbours in y, (B, N, K) int64.
        fused: use the fused operator where there is one.

    Returns:
        (B, N, C).
    """
    return region("aggregation", _aggregated, None, y, graph, "sum", False, fused)


def _aggregated(
    x: Tensor | None, y: Tensor | None, graph: Tensor, mode: str, interleave: bool, fused: bool
) -> Tensor:
    return ops.aggregate(x, y, graph, None, mode, interleave, fused=fused)


def _gathered(y: Tensor, graph: Tensor) -> Tensor:
    table, rows = rows_of(y, graph)
    return table[rows].view(*graph.shape, -1)
