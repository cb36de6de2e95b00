"""The kNN graph and the grid against versions that look at one node at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import distances, grid_edges, knn_by_loops, sum_over_edges
from vigpipe.errors import InputError
from vigpipe.model.graph import check_neighbours, grid_neighbour_sum, knn_graph

many = settings(deadline=None, max_examples=50)


def features(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def sizes(draw):
    """B, N, C and a k, dilation and loop that N nodes allow."""
    num_nodes, loop = draw(st.integers(3, 12)), draw(st.booleans())
    k = draw(st.integers(1, num_nodes - (not loop)))
    dilation = draw(st.integers(1, (num_nodes - (not loop)) // k))
    shape = (draw(st.integers(1, 3)), num_nodes, draw(st.integers(2, 5)))
    return draw(st.integers(0, 2**32)), shape, k, dilation, loop


@many
@given(sizes())
def test_neighbours_are_those_of_a_sorted_distance_matrix(case):
    seed, shape, k, dilation, loop = case
    x = features(seed, *shape)
    assert torch.equal(knn_graph(x, k, dilation, loop), knn_by_loops(x, k, dilation, loop))


@many
@given(sizes())
def test_the_graph_follows_a_renumbering_of_the_nodes(case):
    seed, shape, k, dilation, loop = case
    x = features(seed, *shape)
    new_to_old = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))
    graph = knn_graph(x, k, dilation, loop)
    renumbered = knn_graph(x[:, new_to_old], k, dilation, loop)
    assert torch.equal(new_to_old[renumbered], graph[:, new_to_old])


@many
@given(sizes())
def test_nearest_come_first(case):
    seed, shape, k, dilation, loop = case
    x = features(seed, *shape)
    chosen = distances(x).gather(2, knn_graph(x, k, dilation, loop))
    assert (chosen.diff(dim=-1) >= -1e-12).all()


@many
@given(sizes())
def test_a_node_is_its_own_first_neighbour_or_none_at_all(case):
    seed, shape, k, dilation, loop = case
    graph = knn_graph(features(seed, *shape), k, dilation, loop)
    itself = graph == torch.arange(shape[1])[:, None]
    assert itself[..., 0].all() == loop
    assert not itself[..., 1:].any()


def test_the_length_of_a_node_does_not_matter():
    x, lengths = features(0, 2, 9, 4), torch.rand(2, 9, 1, dtype=torch.float64) + 0.1
    assert torch.equal(knn_graph(x * lengths, 4), knn_graph(x, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    x = features(0, 2, 40, 8).to(dtype)
    assert torch.equal(knn_graph(x, 9), knn_graph(x.float(), 9))


def test_autocast_does_not_narrow_the_distances():
    x = features(0, 2, 40, 8).float()
    expected = knn_graph(x, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(knn_graph(x, 9), expected)


def test_no_gradient_flows_through_the_choice():
    x = features(0, 1, 5, 3).requires_grad_()
    graph = knn_graph(x, 2)
    assert graph.dtype == torch.int64
    assert not graph.requires_grad


def test_too_many_neighbours_are_an_error_with_all_numbers():
    x = features(0, 1, 10, 3)
    assert knn_graph(x, 5, 2).shape == (1, 10, 5)
    with pytest.raises(InputError, match=r"4 \* 3 = 12 neighbours of 10 candidates \(N = 10"):
        knn_graph(x, 4, 3)


def test_without_loops_there_is_one_candidate_less():
    x = features(0, 1, 10, 3)
    assert knn_graph(x, 9, loop=False).shape == (1, 10, 9)
    expected = r"10 \* 1 = 10 neighbours of 9 candidates \(N = 10 nodes, .* not its own neighbour\)"
    with pytest.raises(InputError, match=expected):
        knn_graph(x, 10, loop=False)


@pytest.mark.parametrize(("k", "dilation"), [(0, 1), (-1, 1), (1, 0), (-2, -2)])
def test_counts_below_one_are_an_error(k, dilation):
    with pytest.raises(InputError, match=r"k \* dilation"):
        check_neighbours(k, dilation, 10)


@many
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 2), st.integers(1, 3))
def test_grid_sum_equals_the_sum_over_its_edges(height, width, batch, channels):
    x = features(height * 10 + width, batch, height * width, channels)
    expected = sum_over_edges(x, grid_edges(height, width))
    torch.testing.assert_close(grid_neighbour_sum(x, height, width), expected, rtol=0, atol=1e-13)


def test_grid_neighbours_of_every_node_of_a_3x4_grid():
    degrees = grid_neighbour_sum(torch.ones(1, 12, 1), 3, 4).view(3, 4).int().tolist()
    assert degrees == [
        [3, 5, 5, 3],
        [5, 8, 8, 5],
        [3, 5, 5, 3],
    ]


def test_the_grid_does_not_wrap_around():
    x = torch.zeros(1, 12, 1)
    x[0, 3] = 1.0  # the upper right corner of 3x4
    reached = grid_neighbour_sum(x, 3, 4).view(3, 4).int().tolist()
    assert reached == [
        [0, 0, 1, 0],
        [0, 0, 1, 1],
        [0, 0, 0, 0],
    ]
