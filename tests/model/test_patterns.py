"""Graphs that follow from where the nodes are, against pictures and loops over nodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import (
    grid_by_loops,
    knn_by_loops,
    pattern_by_loops,
)
from vigpipe.model.patterns import (
    grid_graph,
    grid_neighbours,
    pattern_graph,
    pattern_neighbours,
    window_graph,
    windows,
)

many = settings(deadline=None, max_examples=15)
sides = st.integers(1, 10)
CPU = torch.device("cpu")


def features(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@many
@given(sides, sides)
def test_fixed_graphs_equal_loops_over_nodes(height, width):
    grid, pattern = grid_graph(height, width, CPU), pattern_graph(height, width, CPU)
    assert torch.equal(grid, grid_by_loops(height, width))
    assert torch.equal(pattern, pattern_by_loops(height, width))
    assert grid.shape == (height * width, grid_neighbours(height, width))
    assert pattern.shape == (height * width, pattern_neighbours(height, width))


@many
@given(sides, sides, st.booleans())
def test_every_node_has_one_place_in_the_windows(height, width, shift):
    members, places = windows(height, width, shift, CPU)
    assert torch.equal(members.flatten()[places], torch.arange(height * width))
    assert all(len(set(window)) == len(window) for window in members.tolist())


@pytest.mark.parametrize(
    ("height", "width", "shift"), [(9, 8, False), (9, 8, True), (5, 3, True), (1, 8, False)]
)
def test_a_window_graph_is_the_knn_graph_of_every_window(height, width, shift):
    num_nodes = height * width
    x, k = features(0, 2, num_nodes, 4), 3
    graph = window_graph(x, (height, width), k, 1, shift)
    members, places = windows(height, width, shift, CPU)
    size = members.shape[1]
    for node, place in enumerate(places.tolist()):
        window, position = members[place // size], place % size
        local = knn_by_loops(x[:, window], k)[:, position]
        assert torch.equal(graph[:, node], window[local])
