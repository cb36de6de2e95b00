"""Graphs that depend on where the nodes are: 3x3 grid, SVGA's pattern, kNN inside windows."""

import torch
from torch import Tensor

from vigpipe.model.graph import knn_graph

WINDOW = 7  # nodes along a side of a window, as in WiGNet and Swin
SPACING = 2  # rows or columns from one neighbour to the next in SVGA's pattern


def grid_graph(height: int, width: int, device: torch.device) -> Tensor:
    """Connect each node to its 3x3 window, itself included: (N, K) int64, for nodes by raster.

    At the border the window is moved into the image, so all nodes have the same number of distinct
    neighbours, K = min(3, H) * min(3, W).
    """
    rows, columns = _near(height, device), _near(width, device)
    graph = rows[:, None, :, None] * width + columns[None, :, None, :]  # (H, W, 3, 3)
    return graph.flatten(2).flatten(0, 1)


def grid_neighbours(height: int, width: int) -> int:
    """Return the number of neighbours per node in `grid_graph`."""
    return min(3, height) * min(3, width)


def _near(length: int, device: torch.device) -> Tensor:
    """Return the three positions around each position of an axis, (length, 3)."""
    starts = (torch.arange(length, device=device) - 1).clamp(0, max(length - 3, 0))
    return starts.unsqueeze(1) + torch.arange(min(3, length), device=device)


def pattern_graph(height: int, width: int, device: torch.device) -> Tensor:
    """Connect each node to every second node of its row and column, as SVGA does.

    Munir et al. 2023 (arXiv:2307.00395). A node's neighbours are the node itself, then the nodes of
    its row that are 2, 4, ... columns to the right, then those of its column 2, 4, ... rows below;
    both wrap around the edges of the image: (N, K) int64, K = 1 + (W - 1) // 2 + (H - 1) // 2.
    """
    row = torch.arange(height, device=device).view(-1, 1, 1)
    column = torch.arange(width, device=device).view(1, -1, 1)
    right = (column + SPACING * torch.arange(1, -(-width // SPACING), device=device)) % width
    below = (row + SPACING * torch.arange(1, -(-height // SPACING), device=device)) % height
    of_row = (row * width + right).expand(height, width, -1)
    of_column = (below * width + column).expand(height, width, -1)
    return torch.cat((row * width + column, of_row, of_column), dim=-1).flatten(0, 1)


def pattern_neighbours(height: int, width: int) -> int:
    """Return the number of neighbours per node in `pattern_graph`."""
    return 1 + (height - 1) // SPACING + (width - 1) // SPACING


def windows(height: int, width: int, shift: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut the nodes into windows of at most 7x7, as WiGNet does (arXiv:2410.00807).

    Where a side is not a multiple of the window's side, the last window is moved into the image and
    shares nodes with the window beside it. Every other block shifts the windows by half a window,
    wrapping around the edges, so that nodes of different windows meet.

    The results are members, (T, S) int64, the S nodes of each of the T windows; and positions, (N,)
    int64, the index of each node in the flattened members, in the window that chooses for it.
    """
    tops, row_of = _tiles(height, device)
    lefts, column_of = _tiles(width, device)
    down, right = min(WINDOW, height), min(WINDOW, width)
    rows = tops.unsqueeze(1) + torch.arange(down, device=device)  # (tiles, down)
    columns = lefts.unsqueeze(1) + torch.arange(right, device=device)
    moved = (down // 2, right // 2) if shift else (0, 0)
    members = ((rows + moved[0]) % height)[:, None, :, None] * width
    members = members + ((columns + moved[1]) % width)[None, :, None, :]  # (tiles, tiles, d, r)
    members = members.flatten(2).flatten(0, 1)

    tile = row_of.unsqueeze(1) * len(lefts) + column_of  # (H, W)
    row = torch.arange(height, device=device) - tops[row_of]
    column = torch.arange(width, device=device) - lefts[column_of]
    position = tile * (down * right) + row.unsqueeze(1) * right + column
    return members, position.roll(moved, (0, 1)).flatten()


def window_nodes(height: int, width: int) -> int:
    """Return the number of nodes in each of the `windows`."""
    return min(WINDOW, height) * min(WINDOW, width)


def _tiles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where each window starts along an axis, and the window of every position."""
    size = min(WINDOW, length)
    starts = torch.arange(0, length, size, device=device).clamp(max=length - size)
    return starts, torch.arange(length, device=device) // size


def window_graph(
    x: Tensor, grid: tuple[int, int], k: int, dilation: int, shift: bool, fused: bool = True
) -> Tensor:
    """Index the k nearest of (B, N, C) in each node's window, as nodes of the image: (B, N, K)."""
    members, positions = windows(*grid, shift, x.device)
    num_windows, size = members.shape
    inside = x[:, members].flatten(0, 1)  # (B * T, S, C)
    local = knn_graph(inside, k, dilation, fused=fused).unflatten(0, (-1, num_windows))
    chosen = members.expand(x.shape[0], -1, -1).gather(2, local.flatten(2)).unflatten(2, (size, -1))
    return chosen.flatten(1, 2)[:, positions]
