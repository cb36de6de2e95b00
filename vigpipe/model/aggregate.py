"""Aggregation of neighbour features over a graph given as indices."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _rows(x: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
    """All images' nodes as a table (B*N, C), each node's neighbours as rows of it (B*N, K)."""
    num_images, num_nodes, num_channels = x.shape
    offsets = torch.arange(num_images, device=x.device).mul_(num_nodes).view(-1, 1, 1)
    return x.reshape(-1, num_channels), (graph + offsets).flatten(0, 1)


def _reduced(x: Tensor, graph: Tensor, mode: str) -> Tensor:
    # embedding_bag reduces the K rows while reading them: no (B, N, K, C) tensor is made.
    table, rows = _rows(x, graph)
    table = table.float() if table.dtype in (torch.bfloat16, torch.float16) else table
    return F.embedding_bag(rows, table, mode=mode).view(x.shape).to(x.dtype)


def max_relative(x: Tensor, graph: Tensor) -> Tensor:
    """Max over neighbours j of (x_j - x_i), Li et al. 2019 (arXiv:1904.03751), equation 5.

    Rounding is monotone, so max_j(x_j - x_i) is (max_j x_j) - x_i to the last bit.

    Args:
        x: (B, N, C).
        graph: (B, N, K) int64, neighbours of every node.

    Returns:
        (B, N, C); the gradient of a maximum goes to the first neighbour that attains it.
    """
    return _reduced(x, graph, "max") - x


def neighbour_sum(x: Tensor, graph: Tensor) -> Tensor:
    """Sum of x_j over the neighbours j of every node: (B, N, C), (B, N, K) -> (B, N, C)."""
    return _reduced(x, graph, "sum")
