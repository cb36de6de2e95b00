"""Graphs to cut into parts."""

import numpy as np
from hypothesis import strategies as st

from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, Graph, in_rows


def make_graph(num_nodes, sources, targets):
    indptr, indices, _ = in_rows(np.asarray(sources, int), np.asarray(targets, int), num_nodes)
    return Graph(
        "small",
        indptr,
        indices,
        features=np.zeros((num_nodes, 1), dtype=np.float32),
        labels=np.full(num_nodes, NO_CLASS),
        split=np.full(num_nodes, NO_SPLIT, dtype=np.int8),
        class_names=("one",),
    )


def edges_of(graph):
    """The edges (source, target) of a graph, by a loop."""
    return [
        (int(source), target)
        for target in range(graph.num_nodes)
        for source in graph.indices[graph.indptr[target] : graph.indptr[target + 1]]
    ]


def blocks_graph(num_nodes, num_blocks, degree_in, degree_out, seed):
    """A stochastic block model, symmetric: the graph, and the block of each node.

    A node has about `degree_in` neighbours in its block and `degree_out` in all others. There are
    self-loops.
    """
    draws = np.random.default_rng(seed)
    blocks = draws.permutation(np.arange(num_nodes) % num_blocks)
    is_same = blocks[:, None] == blocks
    others = num_nodes / num_blocks
    chance = np.where(is_same, degree_in / others, degree_out / (num_nodes - others))
    upper = np.triu(draws.random((num_nodes, num_nodes)) < chance)
    return make_graph(num_nodes, *np.nonzero(upper | upper.T)), blocks


@st.composite
def graphs(draw, most_nodes=12):
    """Any small graph: directed, with self-loops and nodes without edges."""
    num_nodes = draw(st.integers(1, most_nodes))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=4 * num_nodes))
    return make_graph(num_nodes, [a for a, _ in edges], [b for _, b in edges])
