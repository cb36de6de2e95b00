"""Graphs that follow from where the nodes are: 3x3 grid, SVGA's pattern, kNN inside windows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vigpipe.model.graph import knn_graph

WINDOW = 7  # nodes on a side of a window, as in WiGNet and Swin
EVERY = 2  # rows and columns between the neighbours of SVGA's pattern


def grid_graph(height: int, width: int, device: torch.device) -> Tensor:
    """Each node's 3x3 window, itself included; at the border the window is moved into the image.

    So all nodes have equally many distinct neighbours: min(3, H) * min(3, W).

    Returns:
        (N, K) int64, raster order.
    """
    rows = _window_starts(height, device).unsqueeze(1) + torch.arange(min(3, height), device=device)
    columns = _window_starts(width, device).unsqueeze(1) + torch.arange(
        min(3, width), device=device
    )
    graph = rows[:, None, :, None] * width + columns[None, :, None, :]  # (H, W, 3, 3)
    return graph.flatten(2).flatten(0, 1)


def grid_neighbours(height: int, width: int) -> int:
    """K of grid_graph."""
    return min(3, height) * min(3, width)


def _window_starts(length: int, device: torch.device) -> Tensor:
    return (torch.arange(length, device=device) - 1).clamp(0, max(length - 3, 0))


def pattern_graph(height: int, width: int, device: torch.device) -> Tensor:
    """SVGA's fixed pattern: every second row and column (Munir et al. 2023, arXiv:2307.00395).

    A node's neighbours are itself, then the nodes of its row 2, 4, ... to the right of it, then
    those of its column 2, 4, ... below it, around the edges of the image.

    Returns:
        (N, K) int64, K = 1 + (W - 1) // 2 + (H - 1) // 2.
    """
    row = torch.arange(height, device=device).view(-1, 1, 1)
    column = torch.arange(width, device=device).view(1, -1, 1)
    right = (column + EVERY * torch.arange(1, -(-width // EVERY), device=device)) % width
    below = (row + EVERY * torch.arange(1, -(-height // EVERY), device=device)) % height
    graph = torch.cat(
        (
            row * width + column,
            (row * width + right).expand(height, width, -1),
            (below * width + column).expand(height, width, -1),
        ),
        dim=-1,
    )
    return graph.flatten(0, 1)


def pattern_neighbours(height: int, width: int) -> int:
    """K of pattern_graph."""
    return 1 + (height - 1) // EVERY + (width - 1) // EVERY


def windows(height: int, width: int, shift: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut the nodes into windows of at most 7x7, as WiGNet does (arXiv:2410.00807).

    Where a side is no multiple of the window's, the last window is moved into the image and shares
    nodes with its neighbour. Every other block shifts the windows by half of one, around the edges,
    so that nodes meet others.

    Returns:
        members, (T, S) int64: the nodes of each of T windows;
        places, (N,) int64: where in the flattened members each node has its neighbours chosen.
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
    place = tile * (down * right) + row.unsqueeze(1) * right + column
    return members, place.roll(moved, (0, 1)).flatten()


def _tiles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First positions of the windows along an axis, and the window of every position."""
    size = min(WINDOW, length)
    starts = torch.arange(0, length, size, device=device).clamp(max=length - size)
    return starts, torch.arange(length, device=device) // size


def window_graph(
    x: Tensor, grid: tuple[int, int], k: int, dilation: int, shift: bool, fused: bool = True
) -> Tensor:
    """The kNN graph of every window by itself: (B, N, C) -> (B, N, K), indices of the whole image.

    Args:
        x: node features, (B, N, C), N = height * width.
        grid: height and width in nodes.
        k: neighbours per node.
        dilation: as in knn_graph.
        shift: move the windows by half of one.
        fused: take the fused operator where there is one.
    """
    members, places = windows(*grid, shift, x.device)
    num_windows, size = members.shape
    inside = x[:, members].flatten(0, 1)  # (B * T, S, C)
    local = knn_graph(inside, k, dilation, fused=fused).unflatten(0, (-1, num_windows))
    chosen = members.expand(x.shape[0], -1, -1).gather(2, local.flatten(2)).unflatten(2, (size, -1))
    return chosen.flatten(1, 2)[:, places]


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
