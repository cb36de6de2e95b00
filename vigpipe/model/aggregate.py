"""Aggregation of neighbour features over a graph given as indices.

Everywhere: x (B, N, C) are the nodes, y (B, M, C) the nodes that the graph's indices mean (x itself
unless the neighbours were pooled), graph (B, N, K) int64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vigpipe.model.regions import region


def neighbours(y: Tensor, graph: Tensor) -> Tensor:
    """Every node's neighbours: (B, M, C), (B, N, K) -> (B, N, K, C)."""
    return region("aggregation", _gathered, y, graph)


def max_relative(x: Tensor, graph: Tensor, y: Tensor | None = None) -> Tensor:
    """Max over neighbours j of (y_j - x_i), Li et al. 2019 (arXiv:1904.03751), equation 5.

    Rounding is monotone, so max_j(y_j - x_i) is (max_j y_j) - x_i to the last bit.

    Returns:
        (B, N, C); the gradient of a maximum goes to the first neighbour that attains it.
    """
    return region("aggregation", _reduced, x if y is None else y, graph, "max") - x


def mean_relative(x: Tensor, graph: Tensor, y: Tensor | None = None) -> Tensor:
    """Mean over neighbours j of (y_j - x_i): (B, N, C)."""
    return region("aggregation", _reduced, x if y is None else y, graph, "mean") - x


def neighbour_sum(y: Tensor, graph: Tensor) -> Tensor:
    """Sum of y_j over the neighbours j of every node: (B, M, C), (B, N, K) -> (B, N, C)."""
    return region("aggregation", _reduced, y, graph, "sum")


def _rows(y: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
    """All images' nodes as a table (B*M, C), each node's neighbours as rows of it (B*N, K)."""
    num_images, num_nodes, num_channels = y.shape
    offsets = torch.arange(num_images, device=y.device).mul_(num_nodes).view(-1, 1, 1)
    return y.reshape(-1, num_channels), (graph + offsets).flatten(0, 1)


def _gathered(y: Tensor, graph: Tensor) -> Tensor:
    table, rows = _rows(y, graph)
    return table[rows].view(*graph.shape, -1)


def _reduced(y: Tensor, graph: Tensor, mode: str) -> Tensor:
    table, rows = _rows(y, graph)
    if torch.compiler.is_exporting():  # ONNX knows no embedding_bag of maxima
        gathered = table[rows]
        reduced = gathered.amax(1) if mode == "max" else getattr(gathered, mode)(1)
        return reduced.view(*graph.shape[:2], -1)
    # embedding_bag reduces the K rows while reading them: no (B, N, K, C) tensor is made.
    table = table.float() if table.dtype in (torch.bfloat16, torch.float16) else table
    return F.embedding_bag(rows, table, mode=mode).view(*graph.shape[:2], -1).to(y.dtype)
