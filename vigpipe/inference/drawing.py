"""Draw one node's edges in each block on an image, faded except for the patches they lead to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vigpipe.config.verbs import MADE_BY_GRAPH
from vigpipe.files.figures import matplotlib_defaults
from vigpipe.inference.marks import POINTS_PER_INCH, draw_legend, mark
from vigpipe.inference.panels import PANEL_INCHES, begin, finish, size_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FADED = 0.62  # how much of the image remains outside of the node and its neighbours
FADED_COLOUR = 0.45  # how much of its colour remains of that
FADED_TOWARDS = 200  # light grey
FINEST_GRID_INCHES = 0.04  # lines of the patch grid that are closer would hide the image


@dataclass(frozen=True)
class Panel:
    """One node's edges in one block."""

    block: int  # index in the model's `backbone`
    node: tuple[int, int]  # (row, column) in the grid
    grid: tuple[int, int]  # (H, W) of the nodes
    # (row, column) of each in the grid of candidates; nearest first if it is a kNN graph.
    neighbours: tuple[tuple[int, int], ...]
    candidates: tuple[int, int]  # (H, W) of their grid
    reduction: int  # nodes along a side of a candidate
    note: str  # what the title says of the graph


@matplotlib_defaults()
def draw(pixels: np.ndarray, panels: Sequence[Panel], heading: Sequence[str], path: Path) -> None:
    """Draw the panels, and write the file.

    The pixels are the image as the model sees it, (H, W, 3) uint8. The path ends in .png, .pdf or
    .svg.
    """
    height, width = pixels.shape[:2]
    figure, axes, corner = begin(len(panels), height / width, heading)
    draw_legend(figure, corner)
    for panel, its_axes in zip(panels, axes, strict=True):
        _draw_panel(its_axes, pixels, panel)
    finish(figure, path, MADE_BY_GRAPH)


def _draw_panel(axes: "Axes", pixels: np.ndarray, panel: Panel) -> None:
    from matplotlib.collections import LineCollection

    height, width = pixels.shape[:2]
    node_box = _box(panel.node, panel.grid, (height, width))
    boxes = [_box(p, panel.grid, (height, width), panel.reduction) for p in panel.neighbours]
    lit = np.zeros((height, width), dtype=bool)
    for left, top, right, bottom in [node_box, *boxes]:
        lit[round(top) : max(round(bottom), round(top) + 1), :][
            :, round(left) : max(round(right), round(left) + 1)
        ] = True
    image = np.where(lit[..., None], pixels, _faded(pixels))
    axes.imshow(image, extent=(0, width, height, 0), interpolation="nearest")
    axes.set_axis_off()

    if PANEL_INCHES / panel.grid[1] > FINEST_GRID_INCHES:
        xs = np.linspace(0, width, panel.grid[1] + 1)
        ys = np.linspace(0, height, panel.grid[0] + 1)
        lines = [[(x, 0), (x, height)] for x in xs] + [[(0, y), (width, y)] for y in ys]
        axes.add_collection(LineCollection(lines, colors="0.55", linewidths=0.3, alpha=0.7))
    mark(axes, node_box, boxes, points=PANEL_INCHES * POINTS_PER_INCH / width)
    axes.set_xlim(-0.01 * width, 1.01 * width)
    axes.set_ylim(1.01 * height, -0.01 * height)
    places = f"node in row {panel.node[0]}, column {panel.node[1]} of {size_of(panel.grid)}"
    if panel.candidates != panel.grid:
        places += f", pooled to {size_of(panel.candidates)}"
    axes.set_title(f"block {panel.block}: {panel.note}\n{places}", fontsize=9, pad=3)


def _box(
    position: tuple[int, int], grid: tuple[int, int], size: tuple[int, int], reduction: int = 1
) -> tuple[float, float, float, float]:
    """Return the pixels that reduction x reduction nodes cover: (left, top, right, bottom)."""
    (top, bottom), (left, right) = (
        (i * reduction * pixels / nodes, min((i + 1) * reduction, nodes) * pixels / nodes)
        for i, nodes, pixels in zip(position, grid, size, strict=True)
    )
    return left, top, right, bottom


def _faded(pixels: np.ndarray) -> np.ndarray:
    """Fade pixels towards light grey, so far that the image can still be recognised."""
    grey = pixels.mean(axis=2, keepdims=True)
    paler = FADED_COLOUR * pixels + (1 - FADED_COLOUR) * grey
    return (FADED * paler + (1 - FADED) * FADED_TOWARDS).astype(np.uint8)
