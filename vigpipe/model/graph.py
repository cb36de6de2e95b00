"""Graphs over an image's nodes: nearest neighbours in feature space, and the pixel grid."""

import torch
import torch.nn.functional as F
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
            "take a smaller k or dilation, or larger images"
        )


@torch.no_grad()
def knn_graph(x: Tensor, k: int, dilation: int = 1, loop: bool = True) -> Tensor:
    """Index the k nearest neighbours of every node, nearest first.

    Features are scaled to unit length first, as in ViG: Han et al. 2022 (arXiv:2206.00272), section
    3.1 and its reference code. Dilation: Li et al. 2019 (arXiv:1904.03751).

    Args:
        x: node features, (B, N, C), floating point; gradients do not flow through the choice. Half
            precision is
            widened: distances are taken in float32 or float64.
        k: neighbours per node.
        dilation: keep every dilation-th of the k * dilation nearest.
        loop: a node may be its own neighbour; it is at distance zero, so usually the first.

    Returns:
        (B, N, K) int64. The order among equal distances is not defined.

    Raises:
        InputError: k * dilation exceeds N (or N - 1 without loop); the message gives all three.
    """
    check_neighbours(k, dilation, x.shape[1], loop)
    with torch.autocast(x.device.type, enabled=False):
        x = F.normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)
        # -|x_i - x_j|^2 up to |x_i|^2, which is the same for all candidates j of node i.
        squares = x.square().sum(-1)  # (B, N)
        nearness = torch.baddbmm(
            -squares.unsqueeze(1), x, x.transpose(1, 2), alpha=2.0
        )  # (B, N, N)
        if not loop:
            nearness.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        return nearness.topk(k * dilation, dim=-1).indices[..., ::dilation]


def grid_neighbour_sum(x: Tensor, height: int, width: int) -> Tensor:
    """Sum over the up to 8 grid neighbours of every node; a node is not its own neighbour.

    The grid of 3x3 windows is separable: three shifted sums along each axis, then the node itself
    taken off. For 32x32 nodes that graph has 7,812 directed edges.

    Args:
        x: (B, N, C), N = height * width in raster order.
        height: rows of the grid.
        width: columns of the grid.

    Returns:
        (B, N, C).
    """
    grid = x.unflatten(1, (height, width))  # (B, H, W, C)
    rows = F.pad(grid, (0, 0, 0, 0, 1, 1))
    columns = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    columns = F.pad(columns, (0, 0, 1, 1))
    window = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:]
    return (window - grid).flatten(1, 2)
