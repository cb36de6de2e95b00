"""Sub-graphs on some nodes, against a loop over all edges."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.partitions.small_graphs import edges_of, graphs, make_graph
from vigpipe.graphs.partitions.induced import Induced


def by_loop(graph, nodes):
    """The edges (source, target) of a sub-graph with its own numbers, by a loop over all edges."""
    local = {int(node): number for number, node in enumerate(nodes)}
    edges = [(local[a], local[b]) for a, b in edges_of(graph) if a in local and b in local]
    return sorted(edges, key=lambda edge: (edge[1], edge[0]))


def as_edges(indptr, indices):
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return list(zip(indices.tolist(), targets.tolist(), strict=True))


def an_array(nodes):
    return np.array(sorted(nodes), dtype=np.int64)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_edges_are_those_with_both_ends_among_the_nodes(data):
    graph = data.draw(graphs())
    some_nodes = st.sets(st.integers(0, graph.num_nodes - 1)).map(an_array)
    subgraphs = Induced(graph)  # several times: the table must be clean again after each
    for nodes in data.draw(st.lists(some_nodes, min_size=1, max_size=4)):
        indptr, indices, _ = subgraphs.on(nodes)
        assert indptr.dtype == indices.dtype == np.int64
        assert len(indptr) == len(nodes) + 1
        assert as_edges(indptr, indices) == by_loop(graph, nodes)


@pytest.mark.parametrize("nodes", [[1, 0], [1, 1], [-1, 0], [0, 4]])
def test_nodes_that_would_give_wrong_numbers_are_refused(nodes):
    graph = make_graph(4, [0], [1])
    with pytest.raises(ValueError, match="ascend from 0 to at most 3"):
        Induced(graph).on(np.array(nodes))
