"""Rows of a graph, its transpose, self-loops and weights, against dense matrices."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.gnn.graphs import edge_index, from_dense, pyg, random_adjacency, to_dense
from vigpipe.ops.adjacency import Adjacency, Excerpt, Layered

some = settings(deadline=None, max_examples=40)
graphs = st.builds(
    random_adjacency, st.integers(0, 12), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.integers(0, 99)
)


def theirs_of(*inputs: Any, **options: Any) -> Any:
    pyg()
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    return gcn_norm(*inputs, **options)


@some
@given(graphs)
def test_the_transpose_is_that_of_the_matrix(graph):
    turned, edges = graph.transposed, graph.turned_edges
    assert torch.equal(to_dense(turned), to_dense(graph).T)
    assert torch.equal(turned.targets, graph.indices[edges])
    assert torch.equal(turned.indices, graph.targets[edges])


@some
@given(graphs)
def test_every_node_gets_one_self_loop(graph):
    expected = to_dense(graph) | torch.eye(graph.num_targets, dtype=torch.bool)
    looped, other = graph.with_loops(), from_dense(expected)
    assert torch.equal(looped.indptr, other.indptr)
    assert torch.equal(looped.indices, other.indices)
    assert graph.with_loops() is looped


@some
@given(graphs)
def test_weights_of_gcn_are_those_of_torch_geometric(graph):
    num_nodes, looped = graph.num_targets, graph.with_loops()
    edges, theirs = theirs_of(edge_index(graph), num_nodes=num_nodes, dtype=torch.float64)
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    dense[edges[1], edges[0]] = theirs
    ours = looped.weights("gcn", torch.float64)
    torch.testing.assert_close(ours, dense[looped.targets, looped.indices])
    turned = looped.weights("gcn", torch.float64, transposed=True)
    assert torch.equal(turned, ours[looped.turned_edges])
    narrow = looped.weights("gcn", torch.float32)
    assert torch.equal(narrow, ours.float())
    assert looped.weights("gcn", torch.float32) is narrow


@some
@given(graphs, st.data())
def test_rows_have_degrees_loops_and_weights_of_the_whole(graph, data):
    n = graph.num_targets
    start = data.draw(st.integers(0, n))
    end = data.draw(st.integers(start, n))
    for whole, rows in (
        (graph, graph.rows(start, end)),
        (graph.with_loops(), graph.rows(start, end).with_loops()),
    ):
        assert torch.equal(to_dense(rows), to_dense(whole)[start:end])
        assert torch.equal(rows.in_degrees, whole.in_degrees[start:end])
        own = (whole.targets >= start) & (whole.targets < end)
        for kind in ("ones", "mean", "gcn"):
            values = whole.weights(kind, torch.float32)[own]
            assert torch.equal(rows.weights(kind, torch.float32), values)
            turned = rows.weights(kind, torch.float32, transposed=True)
            assert torch.equal(turned, values[rows.turned_edges])
    rows, x = graph.rows(start, end), torch.arange(n)
    assert torch.equal(rows.own(x), x[start:end])
    assert torch.equal(rows.rows(0, end - start).own(x), x[start:end])
    assert graph.own(x) is x
    assert graph.to("cpu") is graph


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([], [], "rows begin at 0"),
        ([1, 2], [0, 0], "rows begin at 0"),
        ([0, 1], [0, 0], "rows begin at 0 and end at the number of edges, 2"),
        ([0, 1], [1], "from nodes 1 to 1 of 1"),
        ([0, 1], [-1], "from nodes -1 to -1 of 1"),
        ([0, 2, 1], [0], "must not have a negative length"),
    ],
)
def test_what_is_no_graph_is_refused(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        Adjacency(torch.tensor(indptr, dtype=torch.int64), torch.tensor(indices, dtype=torch.int64))


def test_edges_of_other_types_and_factors_of_other_edges_are_refused():
    with pytest.raises(ValueError, match=r"edges are int64 \(got torch.int32"):
        Adjacency(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 factors for 3 edges"):
        sampled([[1, 2], [1]], [2.0, 3.0])


def sampled(edges, factors, degrees=(2, 4, 5), loop_degrees=(3, 4, 6)):
    """Edges of a larger graph, in which node 1 has a self-loop."""
    indptr = torch.tensor([0, *(len(row) for row in edges)]).cumsum(0)
    numbers = torch.tensor(factors, dtype=torch.float64)
    counts = torch.tensor(degrees), torch.tensor(loop_degrees)
    return Excerpt(indptr, torch.tensor([*chain(*edges)]), numbers, *counts)


def test_sampled_edges_have_the_weights_of_the_larger_graph_times_factors():
    graph = sampled([[1, 2], [1]], [2.0, 3.0, 5.0])  # of two targets, from three sources
    assert (graph.num_targets, graph.num_sources) == (2, 3)
    assert graph.weights("ones", torch.float64).tolist() == [2, 3, 5]
    assert graph.weights("mean", torch.float64).tolist() == [2 / 2, 3 / 2, 5 / 4]
    looped = graph.with_loops()
    assert isinstance(looped, Excerpt)
    assert looped.indices.tolist() == [0, 1, 2, 1]
    assert looped.weights("ones", torch.float64).tolist() == [1, 2, 3, 1]
    of_gcn = [1 / 3, 2 / 12**0.5, 3 / 18**0.5, 1 / 4]
    assert looped.weights("gcn", torch.float64).tolist() == pytest.approx(of_gcn, rel=1e-15)
    for whole in (graph, looped):
        turned = whole.weights("mean", torch.float64, transposed=True)
        assert torch.equal(turned, whole.weights("mean", torch.float64)[whole.turned_edges])
        assert whole.edge_factors is not None
        assert torch.equal(whole.rows(1, 2).weights("ones", torch.float64), whole.edge_factors[-1:])
        of_row = whole.rows(1, 2).factors("mean", torch.float64).of_edges
        assert of_row is not None
        assert torch.equal(of_row, whole.weights("mean", torch.float64)[-len(of_row) :])
    x = torch.arange(3)
    assert graph.own(x).tolist() == looped.own(x).tolist() == [0, 1]
    assert graph.to("cpu") is graph


@some
@given(graphs)
def test_where_all_edges_are_sampled_weights_are_those_of_the_graph(graph):
    looped = graph.with_loops()
    ones = torch.ones(graph.num_edges, dtype=torch.float64)
    whole = Excerpt(graph.indptr, graph.indices, ones, graph.in_degrees, looped.in_degrees)
    for ours, theirs in ((whole, graph), (whole.with_loops(), looped)):
        assert torch.equal(ours.indices, theirs.indices)
        for kind in ("ones", "mean", "gcn"):
            weights = ours.weights(kind, torch.float64), theirs.weights(kind, torch.float64)
            assert torch.equal(*weights)


def test_layers_follow_one_another():
    first, last = sampled([[1, 2], [1]], [1.0] * 3), sampled([[1]], [1.0], (2, 4), (3, 4))
    layers = Layered([first, last])
    assert (layers.num_sources, layers.num_targets, layers.num_edges) == (3, 1, 4)
    assert layers.of_layer(1) is last
    assert layers.suits(3, 0, 2)
    assert not layers.suits(2, 0, 2)
    assert layers.suits(2, 1, 2)  # a later stage has the rows that it takes, or more
    assert layers.suits(3, 1, 2)
    assert not layers.suits(4, 1, 2)
    assert not layers.suits(3, 0, 3)
    assert layers.to("cpu").of_layer(0) is first
    with pytest.raises(ValueError, match="layer 0 makes 1 nodes, and the next one takes 3"):
        Layered([last, first])
