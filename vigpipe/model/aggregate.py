"""Aggregation of neighbour features over a graph given as indices.

In every function, x are the nodes, (B, N, C); graph is (B, N, K) int64; y are the candidates that
its indices refer to, (B, M, C), or None for x itself. Where several ranks share an image, x are
this rank's nodes, the graph is that of all nodes, and y stands for all of them.
"""

from functools import partial

import torch
from torch import Tensor

from vigpipe import ops
from vigpipe.model.regions import region
from vigpipe.model.tokens import SharedNodes
from vigpipe.ops.plain import rows_of

Candidates = Tensor | SharedNodes | None


def neighbours(x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
    """Gather the features of every node's neighbours: (B, N, K, C)."""
    if y is None or isinstance(y, Tensor):
        return region("aggregation", _gathered, x if y is None else y, graph)
    return region("aggregation", y.neighbours, x, graph)


def relative(x: Tensor, graph: Tensor, y: Candidates, mode: str, *, fused: bool = True) -> Tensor:
    """Interleave the nodes' features with the maximum or mean of y_j - x_i over the neighbours j.

    Li et al. 2019 (arXiv:1904.03751), equation 5. The mode is `max`, [x0, m0, x1, m1, ...] as the
    published weights of ViG expect, (B, N, 2C); or `max_mean`, maximum and mean, (B, N, 3C).
    """
    if y is None or isinstance(y, Tensor):
        aggregate = partial(ops.aggregate, mode=mode, interleave=True, fused=fused)
        return region("aggregation", aggregate, x, y, graph)
    return region("aggregation", _relative_to, x, y, graph, mode, fused)


def neighbour_sum(x: Tensor, graph: Tensor, y: Candidates = None, *, fused: bool = True) -> Tensor:
    """Sum y_j over the neighbours j of every node: (B, N, C)."""
    if y is None or isinstance(y, Tensor):
        aggregate = partial(ops.aggregate, mode="sum", fused=fused)
        return region("aggregation", aggregate, None, x if y is None else y, graph)
    return region("aggregation", partial(y.reduced, mode="sum", fused=fused), x, graph)


def _relative_to(x: Tensor, shared: SharedNodes, graph: Tensor, mode: str, fused: bool) -> Tensor:
    """Subtract x after reducing: rounding is monotone, so the maximum is the same."""
    reduced = shared.reduced(x, graph, mode, fused=fused).unflatten(2, (x.shape[2], -1))
    x = x.unsqueeze(3)
    return torch.cat((x, reduced - x), dim=3).flatten(2)


def _gathered(y: Tensor, graph: Tensor) -> Tensor:
    table, rows = rows_of(y, graph)
    return table[rows].view(*graph.shape, -1)
