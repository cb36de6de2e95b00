"""GraphSAINT: sub-graphs on nodes that are drawn, with weights that undo the bias of the draw."""

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.graphs.partitions.small_graphs import make_graph
from tests.graphs.samplers.matrices import GRAPH, NUM_NODES, X, matrix
from vigpipe.graphs.graph import TRAIN
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.samplers.counts import count
from vigpipe.graphs.samplers.draws import generator
from vigpipe.graphs.samplers.saint import Saint, by_edges, by_nodes, by_walks
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.ops.adjacency import Excerpt

DRAWN = {
    "node": (by_nodes(GRAPH, "mean", 30), 30),
    "edge": (by_edges(GRAPH, 12), 24),
    "walk": (by_walks(GRAPH, 8, 2), 24),
}
SEED = 5


def saint(draw_nodes, most_drawn, coverage, seed=SEED) -> Saint:
    counts = count(GRAPH, draw_nodes, coverage, seed)
    return Saint(GRAPH, draw_nodes, most_drawn, counts, seed)


@cache
def sampler_of(way: str, coverage: int = 400) -> Saint:
    return saint(*DRAWN[way], coverage)


@pytest.mark.parametrize("way", DRAWN)
def test_the_weighted_loss_of_a_linear_layer_has_the_full_loss_as_its_mean(way):
    sampler, is_train = sampler_of(way), GRAPH.split == TRAIN
    gradient = np.random.default_rng(2).standard_normal(NUM_NODES) + 1  # a linear loss
    x, found = 1 + X[:, 0], {"mean": [], "gcn": [], "ones": []}
    for number in range(600):
        nodes, adjacency, weights = sampler.draw(1, number)
        assert weights is not None
        for kind, of_kind in found.items():
            losses = weights * gradient[nodes] * (matrix(adjacency, kind) @ x[nodes])
            num_training = sampler.num_training_nodes(1, number)
            of_kind.append(losses[is_train[nodes]].sum() / num_training)
    for kind, of_kind in found.items():
        whole = matrix(all_edges(GRAPH), kind) @ x
        full = (gradient * whole)[is_train].sum() / is_train.sum()
        # The counts have been estimated, too.
        error = np.std(of_kind) * np.sqrt(1 / len(of_kind) + 1 / sampler.counts.num_drawn)
        assert abs(np.mean(of_kind) - full) < 3 * error
        assert 15 * error < abs(full)  # otherwise this would show nothing


@pytest.mark.parametrize("way", DRAWN)
def test_weights_follow_how_often_nodes_and_edges_were_counted(way):
    sampler, draw_nodes = sampler_of(way, 3), DRAWN[way][0]
    counted = [
        sorted(set(draw_nodes(generator(SEED, 0, i)).tolist()))
        for i in range(sampler.counts.num_drawn)
    ]
    total = sum(map(len, counted))
    assert total > 3 * NUM_NODES >= total - len(counted[-1])
    assert sampler.num_sub_graphs == (-(-NUM_NODES * len(counted) // total),)
    times = Counter((u, v) for nodes in counted for u in nodes for v in nodes)
    unseen = 0
    for number in range(20):
        assert sampler.about_nodes(2, number) == round(total / len(counted))
        num_edges = sampler.num_edges(2, number)  # of what was not drawn yet
        nodes, adjacency, weights = sampler.draw(2, number)
        assert num_edges == adjacency.num_edges
        assert (np.diff(nodes) > 0).all()
        assert len(nodes) == sampler.num_nodes(2, number) <= sampler.most_nodes
        assert len(nodes) == sampler.about_nodes(2, number)
        assert isinstance(adjacency, Excerpt)
        assert adjacency.edge_factors is not None
        assert adjacency.num_edges == sampler.num_edges(2, number)
        indptr, indices, _ = Induced(GRAPH).on(nodes)
        assert np.array_equal(adjacency.indptr.numpy(), indptr)
        assert np.array_equal(adjacency.indices.numpy(), indices)
        assert np.array_equal(adjacency.degrees.numpy(), all_edges(GRAPH).degrees[nodes].numpy())
        of_nodes = [max(1, times[v, v]) for v in nodes.tolist()]
        assert weights is not None
        assert weights.tolist() == [len(counted) / of_node for of_node in of_nodes]
        edges = zip(indices.tolist(), adjacency.targets.tolist(), strict=True)
        for factor, (u, v) in zip(adjacency.edge_factors.tolist(), edges, strict=True):
            unseen += not times[nodes[u], nodes[v]]
            assert factor == of_nodes[v] / max(1, times[nodes[u], nodes[v]])
    assert unseen > 0 or way == "walk"


def test_nodes_are_drawn_by_their_squared_column_norm():
    matrices = {
        "gcn": matrix(all_edges(GRAPH), "gcn"),
        "mean": matrix(all_edges(GRAPH).with_loops(), "mean"),
    }
    for kind in ("gcn", "mean"):
        drawn = by_nodes(GRAPH, kind, 200_000)(np.random.default_rng(0))
        norms = (matrices[kind] ** 2).sum(axis=0)
        check_frequencies(drawn, norms / norms.sum())


def test_ends_of_edges_are_drawn_by_their_inverse_degrees():
    drawn = by_edges(GRAPH, 100_000)(np.random.default_rng(0))
    edges = all_edges(GRAPH)
    ends = edges.targets.numpy(), edges.indices.numpy()
    weights: Any = GRAPH.weights_of(slice(None))
    inverses = 1 / np.bincount(ends[0], weights)
    chances = weights * (inverses[ends[0]] + inverses[ends[1]])
    by_node = sum(np.bincount(end, chances, NUM_NODES) for end in ends)
    check_frequencies(drawn, by_node / (2 * chances.sum()))


def check_frequencies(drawn, chances):
    expected = len(drawn) * chances
    found = np.bincount(drawn, minlength=len(chances))
    assert (np.abs(found - expected) < 5 * np.sqrt(2 * expected)).all()  # both ends are drawn


def test_walks_go_along_edges_and_stay_where_there_are_none():
    graph = make_graph(4, [1, 2, 3, 0], [0, 1, 1, 0])  # 0 <- 1 <- 2 and 3; a loop at 0
    walks = [by_walks(graph, 1, 3)(np.random.default_rng(i)).tolist() for i in range(300)]
    sources = {0: {0, 1}, 1: {2, 3}, 2: {2}, 3: {3}}
    assert all(b in sources[a] for walk in walks for a, b in pairwise(walk))
    assert {walk[0] for walk in walks} == {0, 1, 2, 3}
    assert len({tuple(walk) for walk in walks if walk[0] == 0}) == 6  # all that there are


def test_nodes_without_edges_do_not_count_where_the_ends_of_edges_are_drawn():
    split = GRAPH.split
    has_edge = np.isin(np.arange(NUM_NODES), np.r_[GRAPH.sources(), GRAPH.targets()])
    draw_nodes, most_drawn = DRAWN["edge"]
    counts = count(GRAPH, draw_nodes, 5, SEED)
    few = has_edge & (np.arange(NUM_NODES) > 2)
    sampler = Saint(GRAPH, draw_nodes, most_drawn, counts, SEED, few)
    num_lost = int(np.count_nonzero((split == TRAIN) & ~few))
    assert num_lost > 0
    assert sampler.num_training_nodes(1, 0) == np.count_nonzero(split == TRAIN) - num_lost
    assert f"; {num_lost} training nodes have no edge and never come" in sampler.describe()
    assert "never come" not in sampler_of("node").describe()
    for number in range(20):
        nodes = sampler.draw(1, number).nodes
        assert sampler.has_training_nodes(1, number) == (split[nodes] == TRAIN).any()
