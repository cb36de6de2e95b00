"""Batches of training nodes: each once an epoch, with sampled edges for every layer."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.partitions.small_graphs import edges_of, graphs, make_graph
from tests.graphs.samplers.matrices import GRAPH, MODELS, NUM_NODES, PLAIN, X, logits, matrix
from vigpipe.graphs.graph import TRAIN
from vigpipe.graphs.samplers.aggregation import degrees_of
from vigpipe.graphs.samplers.fastgcn import ImportantNodes
from vigpipe.graphs.samplers.layered import InLayers
from vigpipe.graphs.samplers.neighbour import Neighbours
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.ops.adjacency import Excerpt, Layered

KINDS: Any = ["mean", "gcn", "ones"]
WAYS: dict[str, Any] = {
    "neighbour": Neighbours(GRAPH, (3, 2)),
    "fastgcn": ImportantNodes(GRAPH, "mean", 9),
}
each_way = pytest.mark.parametrize("way", WAYS)


def sampler_of(way: str, batch_nodes=7, seed=3) -> InLayers:
    return InLayers(GRAPH, WAYS[way], batch_nodes, 2, seed)


@each_way
def test_an_epoch_takes_every_training_node_once_in_a_new_order(way):
    sampler, train, batches = sampler_of(way), GRAPH.nodes_of(TRAIN), []
    assert sampler.num_sub_graphs == (-(-len(train) // 7),)
    for epoch in (1, 2):
        drawn = [sampler.draw(epoch, number) for number in range(*sampler.num_sub_graphs)]
        sizes = [sub_graph.adjacency.num_targets for sub_graph in drawn]
        assert sizes == [sampler.num_training_nodes(epoch, i) for i in range(len(drawn))]
        batches.append([s.nodes[:n].tolist() for s, n in zip(drawn, sizes, strict=True)])
        assert sorted(node for batch in batches[-1] for node in batch) == train.tolist()
        for number, sub_graph in enumerate(drawn):
            assert sub_graph.weights is None
            assert sampler.num_nodes(epoch, number) == len(sub_graph.nodes) <= sampler.most_nodes
            assert sampler.num_edges(epoch, number) == sub_graph.adjacency.num_edges
    assert batches[0] != batches[1]


@each_way
def test_what_was_drawn_is_not_drawn_again_to_be_counted(way, monkeypatch):
    sampler = sampler_of(way)
    first = [sampler.draw(1, number) for number in range(4)]
    assert sampler_of(way).num_nodes(1, 0) == len(first[0].nodes)  # of what was not drawn yet
    monkeypatch.delattr(InLayers, "draw")
    for number, (nodes, adjacency, _) in enumerate(first):
        assert sampler.about_nodes(1, number) == sampler.num_nodes(1, number) == len(nodes)
        assert sampler.num_edges(1, number) == adjacency.num_edges
    assert sampler.about_nodes(7, 0) == round(sum(len(s.nodes) for s in first) / 4)


@each_way
def test_what_is_drawn_depends_on_seed_epoch_and_number_only(way):
    def drawn(seed, epoch, number):
        sampler = sampler_of(way, seed=seed)
        sampler.draw(1, 0)
        nodes, adjacency, _ = sampler.draw(epoch, number)
        return (*nodes.tolist(), *adjacency.of_layer(0).indices.tolist())

    assert drawn(3, 2, 1) == drawn(3, 2, 1)
    others = drawn(3, 2, 1), drawn(3, 1, 2), drawn(3, 2, 0), drawn(4, 2, 1), drawn(3, 1, 1)
    assert len(set(others)) == 5


@settings(deadline=None, max_examples=30)
@given(graphs(), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_layers_have_edges_of_the_graph_between_the_first_nodes(graph, num, most, is_fast, seed):
    graph.split[:] = TRAIN  # a graph of this test alone
    edge_sampler = ImportantNodes(graph, "gcn", most) if is_fast else Neighbours(graph, (most,) * 3)
    sampler, edges = InLayers(graph, edge_sampler, num, 3, seed), edges_of(graph)
    degrees = degrees_of(graph)
    looped = all_edges(graph).with_loops().in_degrees
    assert degrees.looped.tolist() == looped.tolist()
    for number in range(*sampler.num_sub_graphs):
        nodes, adjacency, _ = sampler.draw(1, number)
        assert len(set(nodes.tolist())) == len(nodes) <= sampler.most_nodes
        assert isinstance(adjacency, Layered)
        assert adjacency.num_sources == len(nodes)
        for layer in adjacency.layers:
            assert isinstance(layer, Excerpt)
            assert layer.edge_factors is not None
            rows = layer.indices.split(layer.in_degrees.tolist())
            assert all((row.diff() > 0).all() for row in rows)
            assert layer.degrees.tolist() == degrees.plain[nodes[: layer.num_sources]].tolist()
            of_layer = zip(layer.indices.tolist(), layer.targets.tolist(), strict=True)
            assert {(nodes[u], nodes[v]) for u, v in of_layer} <= set(edges)
            assert (layer.edge_factors >= (0 if is_fast else 1)).all()
            if not is_fast:
                counts = np.minimum(degrees.plain[nodes[: layer.num_targets]], most)
                assert layer.in_degrees.tolist() == counts.tolist()
            # Every node but the targets is there for an edge.
            assert set(range(layer.num_targets, layer.num_sources)) <= set(layer.indices.tolist())


@pytest.mark.parametrize("name", MODELS)
def test_with_all_neighbours_the_logits_are_those_of_the_whole_graph(name):
    most = int(np.diff(GRAPH.indptr).max())
    sampler = InLayers(GRAPH, Neighbours(GRAPH, (most, most)), 7, 2, 3)
    for number in range(*sampler.num_sub_graphs):
        nodes, adjacency, _ = sampler.draw(1, number)
        batch = nodes[: adjacency.num_targets]
        whole = logits(name, np.arange(NUM_NODES))[batch]
        torch.testing.assert_close(logits(name, nodes, adjacency), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("graph", [GRAPH, PLAIN], ids=["weights", "plain"])
@pytest.mark.parametrize("way", ["neighbour", *KINDS])
def test_sums_over_sampled_edges_have_the_sum_over_all_as_their_mean(way, graph):
    kinds = KINDS if way == "neighbour" else [way]
    edge_sampler: Any = Neighbours(graph, (2,))
    if way != "neighbour":
        edge_sampler = ImportantNodes(graph, way, 9)
    sampler, train = InLayers(graph, edge_sampler, NUM_NODES, 1, 3), graph.nodes_of(TRAIN)
    drawn = [sampler.draw(1 + number, 0) for number in range(400)]
    for kind in kinds:
        found = np.array([matrix(a.of_layer(0), kind) @ X[nodes] for nodes, a, _ in drawn])
        truth = (matrix(all_edges(graph), kind) @ X)[train]
        variance = found.var(axis=0).sum()
        errors = {num: ((found[:num].mean(axis=0) - truth) ** 2).sum() for num in (20, 90, 400)}
        for num, error in errors.items():  # as 1 / sqrt(num): the squares have this mean
            assert 0.4 < error * num / variance < 2.5
        assert errors[400] < 5e-2 * (truth**2).sum()


def test_important_nodes_are_drawn_by_their_squared_column_norm_without_self_loops():
    for kind in KINDS:
        norms = matrix(all_edges(GRAPH), kind) ** 2 * (1 - np.eye(NUM_NODES) * (kind == "gcn"))
        shares = norms.sum(axis=0) / norms.sum()
        sampler = ImportantNodes(GRAPH, kind, 1)
        edges = sampler.sample(np.arange(NUM_NODES), 0, np.random.default_rng(0))
        np.testing.assert_allclose(edges.factors, 1 / shares[edges.sources], rtol=1e-12)


def test_where_one_node_has_all_edges_its_sample_is_exact():
    star = make_graph(5, [0, 0, 0, 0], [1, 2, 3, 4])
    edges = ImportantNodes(star, "mean", 3).sample(np.arange(5), 0, np.random.default_rng(0))
    assert edges.nums.tolist() == [0, 1, 1, 1, 1]
    assert edges.factors.tolist() == [1.0] * 4
