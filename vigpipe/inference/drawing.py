"""Draw one node's edges on the image, with one panel per block.

The image is faded except for the patches that the node is connected to. Where neighbours are pooled
(pyramids), their boxes are larger than the node's box.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.atomic import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODE_COLOUR = "#e6004c"
NEIGHBOUR_COLOUR = "#ffb000"
CASING_COLOUR = "black"  # around both, so that they are visible on an image of the same colour
FORMATS = (".png", ".pdf", ".svg")
MADE_BY = "vigpipe graph"
MAX_COLUMNS = 4
PANEL_INCHES = 3.6
DOTS_PER_INCH, POINTS_PER_INCH = 150, 72
FADED = 0.30  # how much of the image remains outside of the node and its neighbours
NODE_LINE = 2.0  # points
MAX_LINE, LINE_PER_SIDE = 1.8, 0.15  # of a neighbour: in points, and as a fraction of its side
CASING = 0.8  # points, both sides together
FINEST_GRID_INCHES = 0.04  # lines of the patch grid that are closer would hide the image


@dataclass(frozen=True)
class Panel:
    """One node's edges in one block.

    Attributes:
        block: index of the block in the model's `backbone`.
        node: (row, column) of the node in the grid.
        grid: (H, W) of the grid of nodes.
        neighbours: (row, column) of every neighbour in the grid of candidates; nearest first if it
            is a kNN graph.
        candidates: (H, W) of the grid of candidates.
        reduction: nodes along a side of a candidate.
        note: description of the graph for the title.
    """

    block: int
    node: tuple[int, int]
    grid: tuple[int, int]
    neighbours: tuple[tuple[int, int], ...]
    candidates: tuple[int, int]
    reduction: int
    note: str


def draw(pixels: np.ndarray, panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels side by side, at most MAX_COLUMNS in a row, and write the file.

    Args:
        pixels: the image as the model sees it, (H, W, 3) uint8.
        panels: the panels to draw, at least one.
        path: picture file to write or replace; it ends in one of FORMATS.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # half a second to import

    height, width = pixels.shape[:2]
    columns = min(len(panels), MAX_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    panel_height = PANEL_INCHES * height / width
    title = 0.45  # inches above every panel
    # A Figure without pyplot draws through Agg, and needs neither pyplot's state nor a display.
    figure = Figure(
        figsize=(columns * PANEL_INCHES + (columns + 1) * 0.1, rows * (panel_height + title) + 0.1),
        dpi=DOTS_PER_INCH,
    )
    inches_wide, inches_high = figure.get_size_inches()
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        left = 0.1 + column * (PANEL_INCHES + 0.1)
        bottom = inches_high - (row + 1) * (panel_height + title)
        axes = figure.add_axes(
            (
                left / inches_wide,
                bottom / inches_high,
                PANEL_INCHES / inches_wide,
                panel_height / inches_high,
            )
        )
        _draw_panel(axes, pixels, panel)
    try:
        save_figure(figure, path, MADE_BY)
    except OSError as error:
        raise InputError(
            f"--out {path}: cannot be written ({error.strerror}); choose another file"
        ) from error


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
        axes.add_collection(LineCollection(lines, colors="0.35", linewidths=0.3, alpha=0.6))
    points = PANEL_INCHES * POINTS_PER_INCH / width  # per pixel of the image
    side = points * min(right - left for left, _, right, _ in boxes)
    line = min(MAX_LINE, LINE_PER_SIDE * side)
    for box in boxes:
        _outline(axes, box, NEIGHBOUR_COLOUR, line, -(line + CASING) / 2 / points)
    _outline(axes, node_box, NODE_COLOUR, NODE_LINE, NODE_LINE / 2 / points)
    axes.set_xlim(-0.01 * width, 1.01 * width)
    axes.set_ylim(1.01 * height, -0.01 * height)
    places = f"{panel.grid[0]}×{panel.grid[1]} nodes"
    if panel.candidates != panel.grid:
        places += f", neighbours pooled to {panel.candidates[0]}×{panel.candidates[1]}"
    axes.set_title(f"block {panel.block}: {panel.note}\n{places}", fontsize=9, pad=3)


def _outline(
    axes: "Axes",
    box: tuple[float, float, float, float],
    colour: str,
    line: float,
    outwards: float,
) -> None:
    """Outline a box with a coloured line and a black casing.

    Neighbours are outlined inside their patch, so that adjacent ones stay apart. The node is
    outlined outside its patch, so that both lines are visible if it is its own neighbour.
    """
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    corner = (left - outwards, top - outwards)
    sides = (right - left + 2 * outwards, bottom - top + 2 * outwards)
    for edge, thickness in ((CASING_COLOUR, line + CASING), (colour, line)):
        axes.add_patch(
            Rectangle(
                corner,
                *sides,
                fill=False,
                edgecolor=edge,
                linewidth=thickness,
                joinstyle="miter",
                clip_on=False,
            )
        )


def _box(
    place: tuple[int, int], grid: tuple[int, int], size: tuple[int, int], reduction: int = 1
) -> tuple[float, float, float, float]:
    """Return the pixels that reduction x reduction nodes cover: (left, top, right, bottom)."""
    (top, bottom), (left, right) = (
        (
            i * reduction * pixels / nodes,
            min((i + 1) * reduction, nodes) * pixels / nodes,
        )
        for i, nodes, pixels in zip(place, grid, size, strict=True)
    )
    return left, top, right, bottom


def _faded(pixels: np.ndarray) -> np.ndarray:
    """Fade pixels towards light grey, with little colour left."""
    grey = pixels.mean(axis=2, keepdims=True)
    return (FADED * (0.3 * pixels + 0.7 * grey) + (1 - FADED) * 225).astype(np.uint8)
