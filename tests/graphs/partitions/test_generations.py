"""Other parts every few epochs: drawn anew, or balanced by what nodes and edges have taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.partitions.small_graphs import graphs
from vigpipe.graphs.graph import neighbours
from vigpipe.graphs.partitions.balance import LIMIT, balanced
from vigpipe.graphs.partitions.generations import Generations, Rates, fit_rates, node_costs
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.sbm import draw

GRAPH = draw("sbm:600,6,8,6", seed=2)


def parts_of(generations, epochs):
    return [generations.partition(epoch).parts for epoch in epochs]


def test_random_parts_are_drawn_anew_and_keep_their_sizes():
    first = make_partition(GRAPH, "random", 10, 2)
    parts = parts_of(Generations(GRAPH, first, 3, 2), range(1, 10))
    for epoch, of_epoch in enumerate(parts):
        assert np.array_equal(of_epoch, parts[epoch - epoch % 3])
        assert np.array_equal(np.bincount(of_epoch), first.sizes)
    assert np.array_equal(parts[0], first.parts)
    assert len({of_epoch.tobytes() for of_epoch in parts}) == 3
    # Two parts of different draws have a tenth of their nodes in common, by chance.
    assert (parts[0] == parts[3]).mean() < 0.2
    again, other = (parts_of(Generations(GRAPH, first, 3, seed), range(1, 10)) for seed in (2, 3))
    assert all(map(np.array_equal, parts, again))
    assert not np.array_equal(parts[3], other[3])


@pytest.mark.parametrize("method", ["metis", "spectral", "walks"])
def test_measured_parts_are_even_in_time_and_keep_edges(method):
    first = make_partition(GRAPH, method, 6, 2)
    generations = Generations(GRAPH, first, 2, 2)
    assert generations.partition(3) is first  # nothing was measured
    rates = Rates(1e-6, 3e-6)
    generations.rates.append(rates)
    second = generations.partition(3)
    assert generations.partition(2) is first
    assert (second.sizes <= generations.most_nodes).all()
    loads = np.bincount(second.parts, node_costs(GRAPH, first.parts, rates))
    assert loads.max() <= LIMIT * loads.mean()
    random = make_partition(GRAPH, "random", 6, 2)
    assert second.num_kept > 2 * random.num_kept
    assert "the slowest part goes from" in generations.describe(1)


@settings(deadline=None, max_examples=40)
@given(graphs(most_nodes=8), st.data())
def test_balancing_moves_nodes_only_where_there_is_room(graph, data):
    num_parts = data.draw(st.integers(1, graph.num_nodes))
    parts = make_partition(graph, "random", num_parts, 0).parts
    costs = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts)))
    )
    most = data.draw(st.integers(1, graph.num_nodes))
    found = balanced(neighbours(graph), parts, costs, num_parts, most)
    before, after = (np.bincount(p, minlength=num_parts) for p in (parts, found))
    assert after.min() >= 1
    assert (after <= np.maximum(before, most)).all()
    loads = [np.bincount(p, costs, num_parts) for p in (parts, found)]
    limit = LIMIT * costs.sum() / num_parts
    assert (loads[1] <= np.maximum(loads[0], limit) + 1e-9).all()
    moved = np.flatnonzero(found != parts)
    assert (loads[0][parts[moved]] > limit).all()


def test_rates_are_found_again():
    draws = np.random.default_rng(0)
    sizes = [(int(n), int(e)) for n, e in draws.integers(100, 5000, (40, 2))]
    seconds = [2e-6 * n + 3e-8 * e for n, e in sizes]
    assert fit_rates(sizes, seconds) == pytest.approx((2e-6, 3e-8))
    assert fit_rates([], []) == (0, 0)
    even = [(1000, e) for _, e in sizes]
    found = fit_rates(even, [0.02 + 3e-8 * e for _, e in even])
    assert found == pytest.approx((2e-5, 3e-8))
    # More edges never take less time.
    assert fit_rates(sizes, [2e-3 * n - 1e-4 * e for n, e in sizes]).per_edge == 0
