"""Mark a node and its neighbours on an image, and say in a legend what the marks mean.

The node has a sight, a frame with four short arms; neighbours have a frame alone. Where neighbours
are pooled (pyramids), their boxes are larger than the node's box.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vigpipe.inference.panels import place_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Box = tuple[float, float, float, float]  # left, top, right, bottom; pixels of the image

NODE_COLOUR = "#e6004c"
NEIGHBOUR_COLOUR = "#ffb000"
CASING_COLOUR = "black"  # a rim makes both visible on an image of the same colour
POINTS_PER_INCH = 72
NODE_LINE = 2.0  # points
ARM, ARM_PER_SIDE = 6.0, 0.4  # the sight's: points, and fraction of the side of its patch
MAX_LINE, LINE_PER_SIDE = 1.8, 0.15  # a neighbour's: points, and fraction of its side
CASING = 0.8  # points, both sides together


def mark(axes: "Axes", node: Box, neighbours: Sequence[Box], points: float) -> None:
    """Mark a node and its neighbours, at least one; a pixel of the image has so many `points`.

    Neighbours are outlined inside their patch, so that adjacent ones stay apart, and the node
    outside its patch, so that both lines are visible if it is its own neighbour.
    """
    side = points * min(right - left for left, _, right, _ in neighbours)
    line = min(MAX_LINE, LINE_PER_SIDE * side)
    for box in neighbours:
        _outline(axes, box, NEIGHBOUR_COLOUR, line, -(line + CASING) / 2 / points)
    _outline(axes, node, NODE_COLOUR, NODE_LINE, NODE_LINE / 2 / points)
    arm = max(ARM, ARM_PER_SIDE * points * (node[2] - node[0]))
    _draw_arms(axes, node, NODE_LINE / points, arm / points)


def draw_legend(figure: "Figure", corner: tuple[float, float]) -> None:
    """Draw the legend, with its upper left corner at these fractions of the picture."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    arms: dict[str, Any] = {"linestyle": "none", "marker": "+", "markersize": 16}
    frame = arms | {"marker": "s", "markerfacecolor": "white", "markersize": 8}
    node = (
        Line2D([], [], markeredgecolor=CASING_COLOUR, markeredgewidth=NODE_LINE + CASING, **arms),
        Line2D([], [], markeredgecolor=NODE_COLOUR, markeredgewidth=NODE_LINE, **arms),
        Line2D([], [], markeredgecolor=NODE_COLOUR, markeredgewidth=NODE_LINE, **frame),
    )
    neighbour = Line2D([], [], markeredgecolor=NEIGHBOUR_COLOUR, markeredgewidth=MAX_LINE, **frame)
    place_legend(
        figure,
        corner,
        [node, neighbour],
        labels=["the node", "its neighbours (often itself too)"],
        handler_map={tuple: HandlerTuple(ndivide=1)},
    )


def _outline(axes: "Axes", box: Box, colour: str, line: float, outwards: float) -> None:
    """Outline a box with a coloured line and a black casing."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    corner = (left - outwards, top - outwards)
    sides = (right - left + 2 * outwards, bottom - top + 2 * outwards)
    look: dict[str, Any] = {"fill": False, "joinstyle": "miter", "clip_on": False}
    for edge, thickness in ((CASING_COLOUR, line + CASING), (colour, line)):
        axes.add_patch(Rectangle(corner, *sides, edgecolor=edge, linewidth=thickness, **look))


def _draw_arms(axes: "Axes", box: Box, gap: float, length: float) -> None:
    """Draw four arms that point from outside at the middles of a box's sides; sizes in pixels."""
    from matplotlib.collections import LineCollection

    left, top, right, bottom = box
    x, y = (left + right) / 2, (top + bottom) / 2
    far = gap + length
    arms = [
        [(left - far, y), (left - gap, y)],
        [(right + gap, y), (right + far, y)],
        [(x, top - far), (x, top - gap)],
        [(x, bottom + gap), (x, bottom + far)],
    ]
    for colour, width in ((CASING_COLOUR, NODE_LINE + CASING), (NODE_COLOUR, NODE_LINE)):
        axes.add_collection(
            LineCollection(arms, colors=colour, linewidths=width, zorder=3), autolim=False
        )
