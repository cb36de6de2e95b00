"""What is drawn, and where: pixels of the picture against the panel."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from vigpipe.inference.drawing import (
    DOTS_PER_INCH,
    NEIGHBOUR_COLOUR,
    NODE_COLOUR,
    PANEL_INCHES,
    Panel,
    draw,
)


def pixels_of(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


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


def test_the_node_and_its_neighbours_are_outlined_where_they_are(tmp_path):
    example = Panel(0, (1, 2), (4, 4), ((0, 0), (3, 3), (3, 2)), (4, 4), 1, "kNN, k = 3")
    image = np.full((32, 32, 3), 128, dtype=np.uint8)
    draw(image, [example], tmp_path / "graph.png")
    picture = pixels_of(tmp_path / "graph.png")
    assert cells(picture, NEIGHBOUR_COLOUR, (4, 4)) == {(0, 0), (3, 3), (3, 2)}
    around = places(picture, NODE_COLOUR)
    patch = PANEL_INCHES * DOTS_PER_INCH / 1.02 / 4
    height, width = np.ptp(around, axis=0)
    assert patch <= height <= patch + 14  # the line runs outside the patch
    assert patch <= width <= patch + 14
    middle = around.mean(0) - (0.45 * DOTS_PER_INCH, 0.1 * DOTS_PER_INCH)
    np.testing.assert_allclose(middle, (1.53 * patch, 2.53 * patch), atol=0.1 * patch)


def test_a_node_that_is_its_own_neighbour_shows_both_colours(tmp_path):
    example = Panel(0, (1, 2), (4, 4), ((1, 2),), (4, 4), 1, "kNN, k = 1")
    draw(np.zeros((32, 32, 3), dtype=np.uint8), [example], tmp_path / "graph.png")
    picture = pixels_of(tmp_path / "graph.png")
    assert cells(picture, NEIGHBOUR_COLOUR, (4, 4)) == {(1, 2)}
    assert len(places(picture, NODE_COLOUR)) > 100


def test_pooled_neighbours_are_as_large_as_what_they_pool(tmp_path):
    # Five nodes a side, pooled two by two: the last candidate of a row is one node wide.
    example = Panel(0, (0, 0), (5, 5), ((0, 2), (1, 0)), (3, 3), 2, "kNN, k = 2")
    draw(np.zeros((40, 40, 3), dtype=np.uint8), [example], tmp_path / "graph.png")
    found = places(pixels_of(tmp_path / "graph.png"), NEIGHBOUR_COLOUR)
    scale = PANEL_INCHES * DOTS_PER_INCH / 1.02
    found = found - (0.45 * DOTS_PER_INCH, 0.1 * DOTS_PER_INCH) - 0.01 * scale
    right, left = found[found[:, 1] > scale / 2], found[found[:, 1] < scale / 2]
    np.testing.assert_allclose(right.min(0), (0, 0.8 * scale), atol=6)
    np.testing.assert_allclose(right.max(0), (0.4 * scale, scale), atol=6)
    np.testing.assert_allclose(left.min(0), (0.4 * scale, 0), atol=6)
    np.testing.assert_allclose(left.max(0), (0.8 * scale, 0.4 * scale), atol=6)


@pytest.mark.parametrize("grey", [0, 128, 255])
def test_what_is_connected_stands_out_on_any_image(grey, tmp_path):
    example = Panel(0, (0, 0), (2, 2), ((1, 1),), (2, 2), 1, "kNN, k = 1")
    draw(np.full((8, 8, 3), grey, dtype=np.uint8), [example], tmp_path / "graph.png")
    picture = pixels_of(tmp_path / "graph.png")
    side = PANEL_INCHES * DOTS_PER_INCH
    at = {
        (row, column): picture[
            round(0.45 * DOTS_PER_INCH + (0.5 + row) * side / 2),
            round(0.1 * DOTS_PER_INCH + (0.5 + column) * side / 2),
        ]
        for row in range(2)
        for column in range(2)
    }
    assert tuple(at[0, 0]) == tuple(at[1, 1]) == (grey,) * 3
    assert tuple(at[0, 1]) == tuple(at[1, 0])
    assert np.abs(at[0, 1] - grey).max() > 20
