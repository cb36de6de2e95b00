"""The kNN graph against versions that look at one node at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import knn_by_loops
from vigpipe.errors import InputError
from vigpipe.model.graph import knn_graph, reduce_k
from vigpipe.ops.plain import nearest

many = settings(deadline=None, max_examples=25)


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


def test_half_precision_is_widened_and_autocast_does_not_narrow_the_distances():
    for dtype in (torch.float16, torch.bfloat16):
        x = features(0, 2, 40, 8).to(dtype)
        assert torch.equal(knn_graph(x, 9), knn_graph(x.float(), 9))
    x = features(0, 2, 40, 8).float()
    expected = knn_graph(x, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(knn_graph(x, 9), expected)


def test_too_many_neighbours_are_an_error_with_all_numbers():
    x = features(0, 1, 10, 3)
    assert knn_graph(x, 5, 2).shape == (1, 10, 5)
    with pytest.raises(InputError, match=r"4 \* 3 = 12 neighbours of 10 candidates \(N = 10"):
        knn_graph(x, 4, 3)
    assert knn_graph(x, 9, loop=False).shape == (1, 10, 9)
    expected = r"10 \* 1 = 10 neighbours of 9 candidates \(N = 10 nodes, .* not its own neighbour\)"
    with pytest.raises(InputError, match=expected):
        knn_graph(x, 10, loop=False)
    for k, dilation in ((0, 1), (-1, 1), (1, 0), (-2, -2)):
        with pytest.raises(InputError, match=r"k \* dilation"):
            knn_graph(x, k, dilation)


# ---- equal distances, and numbers that are none ---------------------------------------------


def on_a_device(nearness, num):
    """The way that is taken where a look at the numbers would hold up the device."""
    return torch.compile(nearest, backend="eager", fullgraph=True)(nearness, num)


@many
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([torch.float32, torch.float64]))
def test_of_equally_near_ones_the_lowest_index_comes_first(seed, num_candidates, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1e-45, 1.0, 1.0 + 2**-23])
    nearness = values[torch.randint(len(values), (2, 3, num_candidates), generator=generator)]
    num = int(torch.randint(1, num_candidates + 1, (), generator=generator))
    chosen = nearest(nearness.to(dtype), num)
    # Python's sort keeps the order of equal ones.
    for image, rows in zip(nearness.tolist(), chosen.tolist(), strict=True):
        assert rows == [sorted(range(len(row)), key=lambda j: -row[j])[:num] for row in image]


def test_both_ways_to_choose_agree():
    nearness = torch.randn(2, 30, 40, generator=torch.Generator().manual_seed(0))
    nearness[:, :10] = nearness[:, :10].round()  # ties, infinities, zeros of both signs
    nearness[:, 3, 5:9] = -torch.inf
    nearness[:, 4, ::2], nearness[:, 4, 1::2] = 0.0, -0.0
    for numbers in (nearness, nearness.double()):
        assert torch.equal(on_a_device(numbers, 9), nearest(numbers, 9))


def test_zero_vectors_are_near_each_other_and_at_distance_one_from_the_rest():
    x = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]])
    assert knn_graph(x, 2)[0].tolist() == [[0, 2], [1, 0], [0, 2], [3, 0]]


def test_ranks_take_the_place_of_the_dilation():
    x = features(0, 2, 12, 4)
    nearest_six, ranks = knn_graph(x, 6), torch.tensor([[5, 0, 3], [1, 2, 4]])
    graph = knn_graph(x, 3, 2, ranks=ranks)
    assert torch.equal(graph[0], nearest_six[0][:, ranks[0]])
    assert torch.equal(graph[1], nearest_six[1][:, ranks[1]])


@many
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 40))
def test_k_and_dilation_are_lowered_no_more_than_they_must(k, dilation, num_candidates):
    fit_k, fit_dilation = reduce_k(k, dilation, num_candidates)
    assert fit_k == min(k, num_candidates)
    assert fit_k * fit_dilation <= num_candidates
    assert fit_dilation == dilation or fit_k * (fit_dilation + 1) > num_candidates
