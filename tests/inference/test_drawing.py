"""What is drawn, and where: pixels of the picture against the panel."""

from html import unescape

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from tests.timing.test_timeline import text_of
from vigpipe.inference.drawing import Panel, draw
from vigpipe.inference.marks import (
    ARM,
    ARM_PER_SIDE,
    NEIGHBOUR_COLOUR,
    NODE_COLOUR,
    POINTS_PER_INCH,
)
from vigpipe.inference.panels import DOTS_PER_INCH, HEADING_INCHES, PANEL_INCHES

HEADING = ("cat.jpg, node at pixel 3,4", "vig_ti_224, random weights")
HEADING_DOTS = round(HEADING_INCHES * DOTS_PER_INCH)


def pixels_of(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def panels_of(path) -> np.ndarray:
    """The picture below its heading."""
    return pixels_of(path)[HEADING_DOTS:]


def places(picture: np.ndarray, colour: str) -> np.ndarray:
    """(row, column) of the dots of a colour."""
    wanted = np.array(to_rgb(colour)) * 255
    return np.argwhere(np.abs(picture - wanted).max(-1) < 3)


def cells(picture: np.ndarray, colour: str, grid: tuple[int, int]) -> set[tuple[int, int]]:
    """Patches of a picture with one panel in which a colour has many dots, by row and column."""
    side = PANEL_INCHES * DOTS_PER_INCH
    left = 0.1 * DOTS_PER_INCH
    top = 0.45 * DOTS_PER_INCH
    margin = 0.01  # around the image, on each side
    counts: dict[tuple[int, int], int] = {}
    for row, column in places(picture, colour):
        y = ((row - top) / side * (1 + 2 * margin) - margin) * grid[0]
        x = ((column - left) / side * (1 + 2 * margin) - margin) * grid[1]
        cell = (int(np.floor(y)), int(np.floor(x)))
        counts[cell] = counts.get(cell, 0) + 1
    return {cell for cell, count in counts.items() if count > 0.5 * max(counts.values())}


def picture_of(image: np.ndarray, panel: Panel, tmp_path) -> np.ndarray:
    draw(image.astype(np.uint8), [panel], HEADING, tmp_path / "graph.png")
    return panels_of(tmp_path / "graph.png")


def test_the_node_and_its_neighbours_itself_among_them_are_outlined_where_they_are(tmp_path):
    example = Panel(0, (1, 2), (4, 4), ((0, 0), (1, 2), (3, 3), (3, 2)), (4, 4), 1, "kNN, k = 4")
    picture = picture_of(np.full((32, 32, 3), 128), example, tmp_path)
    assert cells(picture, NEIGHBOUR_COLOUR, (4, 4)) == {(0, 0), (1, 2), (3, 3), (3, 2)}
    around = places(picture, NODE_COLOUR)
    patch = PANEL_INCHES * DOTS_PER_INCH / 1.02 / 4
    height, width = np.ptp(around, axis=0)
    sight = (1 + 2 * ARM_PER_SIDE) * patch
    assert sight <= height <= sight + 14  # the line runs outside the patch
    assert sight <= width <= sight + 14
    middle = around.mean(0) - (0.45 * DOTS_PER_INCH, 0.1 * DOTS_PER_INCH)
    np.testing.assert_allclose(middle, (1.53 * patch, 2.53 * patch), atol=0.1 * patch)


def test_the_node_is_told_by_its_sight_and_not_by_its_colour_alone(tmp_path):
    example = Panel(0, (1, 2), (32, 32), ((10, 2), (20, 7)), (32, 32), 1, "kNN, k = 2")
    picture = picture_of(np.zeros((32, 32, 3)), example, tmp_path)
    dot = PANEL_INCHES * DOTS_PER_INCH / 1.02 / 32
    found = places(picture, NODE_COLOUR)
    middle = found.mean(0)
    arm = ARM / POINTS_PER_INCH * DOTS_PER_INCH  # of a small patch, longer than the patch itself
    for axis in (0, 1):
        along = np.abs(found[:, 1 - axis] - middle[1 - axis]) < 0.25 * dot
        reach = found[along][:, axis] - middle[axis]
        assert reach.max() > 0.5 * dot + 0.8 * arm
        assert reach.min() < -0.5 * dot - 0.8 * arm
    frames = places(picture, NEIGHBOUR_COLOUR)
    first = frames[frames[:, 0] < frames[:, 0].mean()]
    assert np.ptp(first, axis=0).max() < dot  # a frame alone


def test_a_legend_and_the_titles_tell_image_model_block_and_node(tmp_path):
    example = Panel(7, (1, 2), (4, 4), ((0, 0),), (4, 4), 1, "kNN, k = 1")
    image = np.zeros((32, 32, 3), dtype=np.uint8)
    for name in ("graph.png", "graph.svg"):
        draw(image, [example], HEADING, tmp_path / name)
    text = text_of(tmp_path / "graph.svg")
    for words in (*HEADING, "block 7", "row 1, column 2 of 4×4", "the node", "its neighbours"):
        assert words in text, words
    heading = pixels_of(tmp_path / "graph.png")[:HEADING_DOTS]
    assert len(places(heading, NODE_COLOUR)) > len(places(heading, NEIGHBOUR_COLOUR)) > 50


@pytest.mark.parametrize(
    "name", ["a$\\frac{b$ c_d^e.jpg", "<script>&.jpg", "\u4e2d\u6587.jpg", 60 * "long " + ".jpg"]
)
def test_a_name_is_text_whatever_it_holds(name, tmp_path):
    example = Panel(0, (1, 2), (4, 4), ((0, 0),), (4, 4), 1, "kNN, k = 1")
    draw(np.zeros((8, 8, 3), dtype=np.uint8), [example], (name, "model"), tmp_path / "graph.svg")
    text = unescape(text_of(tmp_path / "graph.svg"))  # comments of an SVG are escaped too
    if len(name) < 30:
        assert name in text
    else:
        assert name not in text
        assert "…" in text
        assert "long .jpg" in text


def test_a_faded_image_keeps_more_than_half_of_its_contrast(tmp_path):
    example = Panel(0, (0, 0), (2, 2), ((0, 0),), (2, 2), 1, "kNN, k = 1")
    image = np.zeros((8, 8, 3))
    image[:, 6:] = 255  # the right half has a dark and a bright part
    picture = picture_of(image, example, tmp_path)
    row = round((0.45 + 0.6 * PANEL_INCHES) * DOTS_PER_INCH)
    dark, bright = (
        picture[row, round((0.1 + at * PANEL_INCHES) * DOTS_PER_INCH)] for at in (0.62, 0.9)
    )
    assert (bright - dark).min() > 0.5 * 255


def test_pooled_neighbours_are_as_large_as_what_they_pool(tmp_path):
    # Five nodes a side, pooled two by two: the last candidate of a row is one node wide.
    example = Panel(0, (0, 0), (5, 5), ((0, 2), (1, 0)), (3, 3), 2, "kNN, k = 2")
    found = places(picture_of(np.zeros((40, 40, 3)), example, tmp_path), NEIGHBOUR_COLOUR)
    scale = PANEL_INCHES * DOTS_PER_INCH / 1.02
    found = found - (0.45 * DOTS_PER_INCH, 0.1 * DOTS_PER_INCH) - 0.01 * scale
    right, left = found[found[:, 1] > scale / 2], found[found[:, 1] < scale / 2]
    np.testing.assert_allclose(right.min(0), (0, 0.8 * scale), atol=6)
    np.testing.assert_allclose(right.max(0), (0.4 * scale, scale), atol=6)
    np.testing.assert_allclose(left.min(0), (0.4 * scale, 0), atol=6)
    np.testing.assert_allclose(left.max(0), (0.8 * scale, 0.4 * scale), atol=6)


@pytest.mark.parametrize("grey", [0, 255])
def test_what_is_connected_stands_out_on_any_image(grey, tmp_path):
    example = Panel(0, (0, 0), (2, 2), ((1, 1),), (2, 2), 1, "kNN, k = 1")
    picture = picture_of(np.full((8, 8, 3), grey), example, tmp_path)
    rows, columns = (
        [round((first + at * PANEL_INCHES) * DOTS_PER_INCH) for at in (0.25, 0.75)]
        for first in (0.45, 0.1)
    )
    colours = picture[np.ix_(rows, columns)]
    assert (colours[[0, 1], [0, 1]] == grey).all()
    assert tuple(colours[0, 1]) == tuple(colours[1, 0])
    assert np.abs(colours[0, 1] - grey).max() > 20
