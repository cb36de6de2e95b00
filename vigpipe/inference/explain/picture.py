"""Draw an explanation: over an image, or as a graph around a node.

Red is what the logit rests on, because it falls without it; blue is what it grows without. The
colour is the stronger, and an arrow the wider, the larger the number is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vigpipe.config.verbs import MADE_BY_EXPLAIN
from vigpipe.files.figures import matplotlib_defaults
from vigpipe.files.names import shortened
from vigpipe.inference.panels import begin, finish, place_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOR, AGAINST, UNKNOWN = "#c0001a", "#0057c2", "#9a9a9a"
STRONGEST = 0.8  # how much of a patch its colour hides
PALE = 0.55  # how much of the image is white
MOST_CHARACTERS = 16  # of a node's name
ROOM_OF_NAME = (0.35, 0.05)  # of a panel with nodes
BEND = 0.15  # of an arrow, so that both of a pair of nodes can be seen
DOT, OWN_DOT = 30, 110  # points²
WIDEST, THINNEST = 2.6, 0.7  # of arrows, points
MARGIN = 0.1  # around a graph, fraction of the panel


@dataclass(frozen=True)
class Heat:
    """What each node, or each square of nodes, is worth."""

    title: str
    values: np.ndarray  # (H', W') over an image, (m,) of a graph's nodes; NaN for unknown


@dataclass(frozen=True)
class Arrows:
    """What each edge is worth."""

    title: str
    starts: np.ndarray  # (k, 2), fractions of the panel from its upper left corner: x, y
    ends: np.ndarray  # (k, 2)
    values: np.ndarray  # (k,)


@matplotlib_defaults()
def draw_explanation(
    background: np.ndarray,
    panels: Sequence[Heat | Arrows],
    heading: Sequence[str],
    path: Path,
    names: Sequence[str] = (),
) -> None:
    """Draw panels over an image, (H, W, 3) uint8, or over places of nodes, (m, 2), as `Arrows`.

    The first of these places is that of the node that is explained; the first ones have names. The
    path ends in .png, .pdf or .svg.
    """
    from matplotlib.patches import Patch

    is_image = background.ndim == 3
    ratio = background.shape[0] / background.shape[1] if is_image else 1.0
    figure, axes, corner = begin(len(panels), ratio, heading)
    colours = [Patch(color=FOR), Patch(color=AGAINST)]
    meanings = ["the logit rests on it", "the logit is larger without it"]
    place_legend(figure, corner, colours, labels=meanings)
    for panel, its_axes in zip(panels, axes, strict=True):
        its_axes.set_title(panel.title, fontsize=9, pad=3)
        its_axes.set_axis_off()
        values = panel.values if isinstance(panel, Heat) else None
        if is_image:
            _draw_image(its_axes, background, values)
        else:
            _draw_nodes(its_axes, background, values, names)
        if isinstance(panel, Arrows):
            _draw_arrows(its_axes, panel)
        margin = 0.01 if is_image else MARGIN
        its_axes.set_xlim(-margin, 1 + margin)
        its_axes.set_ylim(1 + margin, -margin)
    finish(figure, path, MADE_BY_EXPLAIN)


def _shades(values: np.ndarray) -> np.ndarray:
    """Return how strong each colour is, 0 to 1; NaN stays."""
    largest = np.nanmax(np.abs(values), initial=0.0)
    return np.abs(values) / (largest or 1.0)


def _colours(values: np.ndarray) -> np.ndarray:
    """Return the colour of each number at its strongest, (..., 3) from 0 to 1."""
    from matplotlib.colors import to_rgb

    is_for = (values > 0)[..., None]
    known = np.where(is_for, np.array(to_rgb(FOR)), np.array(to_rgb(AGAINST)))
    return np.where(np.isnan(values)[..., None], np.array(to_rgb(UNKNOWN)), known)


def _draw_image(axes: "Axes", pixels: np.ndarray, values: np.ndarray | None) -> None:
    options: dict[str, Any] = {"extent": (0, 1, 1, 0), "interpolation": "nearest"}
    grey = np.repeat(pixels.mean(2, keepdims=True), 3, axis=2)
    axes.imshow((PALE * 255 + (1 - PALE) * grey).astype(np.uint8), aspect="auto", **options)
    if values is not None:
        shades = STRONGEST * _shades(values)[..., None]
        axes.imshow(np.concatenate((_colours(values), shades), -1), aspect="auto", **options)


def _draw_nodes(
    axes: "Axes", places: np.ndarray, values: np.ndarray | None, names: Sequence[str]
) -> None:
    faces: Any = "white"
    if values is not None:
        shades = np.nan_to_num(_shades(values))[:, None]
        faces = shades * _colours(values) + (1 - shades)
    sizes = np.full(len(places), DOT)
    sizes[0] = OWN_DOT
    axes.scatter(*places.T, s=sizes, c=faces, edgecolors="0.35", linewidths=0.7, zorder=2)
    if values is None:
        return  # arrows would run through the names
    named: list[np.ndarray] = []
    for place, name in zip(places, names, strict=False):
        # The first names are those of the nodes that count most; others that overlap them are not
        # written.
        if any((np.abs(place - other) < ROOM_OF_NAME).all() for other in named):
            continue
        named.append(place)
        axes.annotate(
            shortened(name, MOST_CHARACTERS),
            place,
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            parse_math=False,
        )


def _draw_arrows(axes: "Axes", arrows: Arrows) -> None:
    shades = _shades(arrows.values)
    weakest_first = np.argsort(shades, kind="stable")
    colours = _colours(arrows.values)
    for i in weakest_first:  # so that the strongest lie on top
        width = THINNEST + (WIDEST - THINNEST) * shades[i]
        look: dict[str, Any] = {"color": colours[i], "alpha": 0.5 + 0.5 * shades[i], "zorder": 3}
        start, end = arrows.starts[i], arrows.ends[i]
        if np.array_equal(start, end):  # the node itself
            axes.plot(*start, marker="o", fillstyle="none", markeredgewidth=width, **look)
            continue
        style: dict[str, Any] = {
            "arrowstyle": "-|>,head_width=0.18,head_length=0.35",
            "connectionstyle": f"arc3,rad={BEND}",
        }
        axes.annotate(
            "", end, start, arrowprops={**style, "linewidth": width, "shrinkA": 0, **look}
        )
