"""Positional tables that are added to features or to distances, for any image size."""

from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # height and width in nodes


def pooled_grid(grid: Grid, reduction: int) -> Grid:
    """Return the grid after averaging r x r nodes into one, with fewer nodes at the edges."""
    return ceil(grid[0] / reduction), ceil(grid[1] / reduction)


def resized_embedding(table: Tensor, grid: Grid) -> Tensor:
    """Resize a positional embedding bicubically: (1, C, H0, W0) -> (1, C, H, W)."""
    if tuple(table.shape[2:]) == grid:
        return table
    wide = table.float() if table.dtype in (torch.bfloat16, torch.float16) else table
    return F.interpolate(wide, size=grid, mode="bicubic", align_corners=False).to(table.dtype)


@torch.no_grad()
def relative_distance(
    channels: int, grid: Grid, reduction: int, base: Grid | None = None
) -> Tensor:
    """Make the table that ViG adds to squared distances in feature space to prefer near nodes.

    The table is -2 P Q^T / C. P is the sine-cosine embedding of the nodes (He et al. 2021, MAE,
    arXiv:2111.06377); Q, that of the candidates, is P averaged over the r x r nodes that make up a
    candidate. With `base`, the positions of the nodes are scaled to the range of that grid, so that
    a table for larger images keeps its meaning relative to the image. It is (1, N, M) float32; C
    is a multiple of 4.
    """
    table = _sine_cosine(channels, grid, base or grid)
    pooled = table
    if reduction > 1:
        images = table.T.unflatten(1, grid).unsqueeze(0)
        pooled = F.avg_pool2d(images, reduction, reduction, ceil_mode=True)[0].flatten(1).T
    return (-2 / channels * table @ pooled.T).float().unsqueeze(0)


@torch.no_grad()
def resized_by_raster(table: Tensor, grid: Grid, reduction: int) -> Tensor:
    """Resize a table bicubically over the flattened rasters: (1, N0, M0) -> (1, N, M).

    The published code also pools candidates in this way, from a table made with r = 1.
    Interpolating along the raster of the nodes is wrong in two dimensions, but published weights
    were trained with it.
    """
    size = prod(grid), prod(pooled_grid(grid, reduction))
    if tuple(table.shape[1:]) == size:
        return table
    return F.interpolate(table.unsqueeze(1), size=size, mode="bicubic", align_corners=False)[:, 0]


def _sine_cosine(channels: int, grid: Grid, base: Grid) -> Tensor:
    """Embed positions, (N, C) float64: columns in the first half, rows in the second."""
    quarter = channels // 4
    omega = 10000 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (
        (torch.arange(length, dtype=torch.float64) + 0.5) * (base_length / length) - 0.5
        for length, base_length in zip(grid, base, strict=True)
    )
    row = rows.repeat_interleave(grid[1]).unsqueeze(1) * omega  # (N, C / 4)
    column = columns.repeat(grid[0]).unsqueeze(1) * omega
    return torch.cat((column.sin(), column.cos(), row.sin(), row.cos()), dim=1)
