"""Draw one node's edges in each block on an image, faded except for the patches they lead to.

`begin` and `finish` are for other pictures of panels, too.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vigpipe.config.verbs import MADE_BY_GRAPH
from vigpipe.files.atomic import save_figure
from vigpipe.files.figures import matplotlib_defaults
from vigpipe.files.names import shortened
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.inference.marks import POINTS_PER_INCH, draw_legend, mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 4
PANEL_INCHES = 3.6
MARGIN_INCHES = 0.1
TITLE_INCHES = 0.45  # every panel has a title of two lines
HEADING_INCHES = 0.75  # all panels have one heading of two lines and the legend
LINE_INCHES, CHARACTER_INCHES = 0.2, 0.078  # the heading's lines, and a character in the mean
DOTS_PER_INCH = 150
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


def begin(
    num_panels: int, ratio: float, heading: Sequence[str]
) -> tuple["Figure", list["Axes"], tuple[float, float]]:
    """Begin a picture of panels side by side, at most MAX_COLUMNS in a row.

    Above them, at least one, are two lines of heading, cut to the picture's width, and room for a
    legend, the upper left corner of which is returned. The ratio is that of height to width.
    """
    from matplotlib.figure import Figure  # half a second to import

    rows = math.ceil(num_panels / MAX_COLUMNS)
    columns = math.ceil(num_panels / rows)  # five are three and two
    panel_height = PANEL_INCHES * ratio
    inches_wide = columns * PANEL_INCHES + (columns + 1) * MARGIN_INCHES
    inches_high = HEADING_INCHES + rows * (panel_height + TITLE_INCHES) + MARGIN_INCHES
    # A Figure without pyplot draws through Agg, and needs neither pyplot's state nor a display.
    figure = Figure(figsize=(inches_wide, inches_high), dpi=DOTS_PER_INCH)
    axes: list[Axes] = []
    for i in range(num_panels):
        row, column = divmod(i, columns)
        left = MARGIN_INCHES + column * (PANEL_INCHES + MARGIN_INCHES)
        bottom = inches_high - HEADING_INCHES - (row + 1) * (panel_height + TITLE_INCHES)
        corner = left / inches_wide, bottom / inches_high
        size = PANEL_INCHES / inches_wide, panel_height / inches_high
        axes.append(figure.add_axes((*corner, *size)))
    return figure, axes, _draw_heading(figure, heading, inches_wide, inches_high)


def finish(figure: "Figure", path: Path, mark: str) -> None:
    """Write the picture, which carries the mark of the command that made it."""
    unwritable = told_if_unwritable(f"--out {path}", "choose another file")
    with unwritable, warnings.catch_warnings():
        # A file's name may be in any script; what the font lacks is drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        save_figure(figure, path, mark)


def _draw_heading(
    figure: "Figure", heading: Sequence[str], inches_wide: float, inches_high: float
) -> tuple[float, float]:
    """Write the heading; return where the legend goes below it."""
    left = MARGIN_INCHES / inches_wide
    most = int((inches_wide - 2 * MARGIN_INCHES) / CHARACTER_INCHES) - 1  # the ellipsis takes one
    for i, line in enumerate(heading):
        figure.text(
            left,
            1 - (MARGIN_INCHES + i * LINE_INCHES) / inches_high,
            shortened(line, most),
            va="top",
            fontsize=10,
            parse_math=False,
        )
    return left, 1 - (MARGIN_INCHES + len(heading) * LINE_INCHES) / inches_high


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


def size_of(grid: tuple[int, ...]) -> str:
    """Write how many nodes a grid has in each direction."""
    return f"{grid[0]}×{grid[1]}"


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
