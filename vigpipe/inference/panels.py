"""A picture of panels side by side, with a heading and a legend above them."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vigpipe.files.atomic import save_figure
from vigpipe.files.names import shortened
from vigpipe.files.outputs import told_if_unwritable

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


def place_legend(
    figure: "Figure", corner: tuple[float, float], handles: Sequence[Any], **options: Any
) -> None:
    """Put a legend below the heading, with its upper left corner where `begin` says."""
    look: dict[str, Any] = {"loc": "upper left", "frameon": False, "fontsize": 9}
    room: dict[str, Any] = {"borderaxespad": 0, "borderpad": 0.2, "ncols": len(handles)}
    figure.legend(handles=handles, bbox_to_anchor=corner, **look, **room, **options)


def size_of(grid: tuple[int, ...]) -> str:
    """Write how many nodes a grid has in each direction."""
    return f"{grid[0]}×{grid[1]}"
