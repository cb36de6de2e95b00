"""Where a node is: tables that are added to features or to distances, for any size of image."""

from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # height and width in nodes


def pooled_grid(grid: Grid, reduction: int) -> Grid:
    """The grid after r x r nodes became one; at the edges fewer may."""
    return ceil(grid[0] / reduction), ceil(grid[1] / reduction)


def resized_embedding(table: Tensor, grid: Grid) -> Tensor:
    """A positional embedding for another grid, bicubic in both directions.

    (1, C, H0, W0) -> (1, C, H, W).
    """
    if tuple(table.shape[2:]) == grid:
        return table
    wide = table.float() if table.dtype in (torch.bfloat16, torch.float16) else table
    return F.interpolate(wide, size=grid, mode="bicubic", align_corners=False).to(table.dtype)


@torch.no_grad()
def relative_distance(
    channels: int, grid: Grid, reduction: int, base: Grid | None = None
) -> Tensor:
    """What ViG adds to squared distances in feature space so that near nodes are preferred.

    -2 P Q^T / C: P the sine-cosine table of the nodes (He et al. 2021, MAE, arXiv:2111.06377), Q
    that of the candidates, which is P averaged over the r x r nodes that make a candidate. On
    `base`, another grid than the one it serves, positions are spread over base: a table for larger
    images keeps its meaning relative to the image.

    Args:
        channels: C, a multiple of 4.
        grid: height and width in nodes.
        reduction: r.
        base: the grid that the positions count on; by default the grid itself.

    Returns:
        (1, N, M) float32.
    """
    table = _sine_cosine(channels, grid, base or grid)
    pooled = table
    if reduction > 1:
        images = table.T.unflatten(1, grid).unsqueeze(0)
        pooled = F.avg_pool2d(images, reduction, reduction, ceil_mode=True)[0].flatten(1).T
    return (-2 / channels * table @ pooled.T).float().unsqueeze(0)


@torch.no_grad()
def relative_distance_by_raster(channels: int, grid: Grid, reduction: int) -> Tensor:
    """The same as published: the candidates' columns interpolated along the raster of the nodes.

    Wrong in two dimensions where r > 1, but published weights were trained with it.

    Returns:
        (1, N, M) float32.
    """
    return resized_by_raster(relative_distance(channels, grid, 1), grid, reduction)


@torch.no_grad()
def resized_by_raster(table: Tensor, grid: Grid, reduction: int) -> Tensor:
    """Bicubic over the flattened rasters, as the published code does: (1, N0, M0) -> (1, N, M)."""
    size = prod(grid), prod(pooled_grid(grid, reduction))
    if tuple(table.shape[1:]) == size:
        return table
    return F.interpolate(table.unsqueeze(1), size=size, mode="bicubic", align_corners=False)[:, 0]


def _sine_cosine(channels: int, grid: Grid, base: Grid) -> Tensor:
    """(N, C) float64: the first half tells the column, the second the row; sines, then cosines."""
    quarter = channels // 4
    omega = 10000 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (
        (torch.arange(length, dtype=torch.float64) + 0.5) * (base_length / length) - 0.5
        for length, base_length in zip(grid, base, strict=True)
    )
    row = rows.repeat_interleave(grid[1]).unsqueeze(1) * omega  # (N, C / 4)
    column = columns.repeat(grid[0]).unsqueeze(1) * omega
    return torch.cat((column.sin(), column.cos(), row.sin(), row.cos()), dim=1)
