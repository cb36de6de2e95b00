"""Partitions made by all methods."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.partitions.small_graphs import blocks_graph, edges_of, graphs, make_graph
from tests.refusals import check_refusals
from vigpipe.graphs.graph import TEST, TRAIN
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.partitions.partition import METHODS
from vigpipe.graphs.partitions.spectral import MOST_NODES

every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_parts_are_disjoint_have_all_nodes_and_keep_the_edges_inside(method, data):
    graph = data.draw(graphs())
    num_parts = data.draw(st.integers(1, graph.num_nodes))
    partition = make_partition(graph, method, num_parts, seed=data.draw(st.integers(0, 2**40)))
    nodes = [partition.nodes_of(part) for part in range(num_parts)]
    assert all(len(of_part) for of_part in nodes)
    assert sorted(np.concatenate(nodes).tolist()) == list(range(graph.num_nodes))
    subgraphs = Induced(graph)
    kept = []
    for of_part in nodes:
        indptr, indices, _ = subgraphs.on(of_part)
        targets = np.repeat(of_part, np.diff(indptr))
        kept += zip(of_part[indices].tolist(), targets.tolist(), strict=True)
    of_parent = Counter(edges_of(graph))
    assert Counter(kept) <= of_parent
    assert len(kept) == partition.num_kept
    assert len(kept) == pytest.approx(partition.kept_edge_fraction * graph.num_edges)


@every_method
def test_a_seed_gives_the_same_parts_and_another_seed_others(method):
    graph, _ = blocks_graph(200, 4, degree_in=6, degree_out=6, seed=0)
    parts = [make_partition(graph, method, 5, seed).parts for seed in (0, 0, 1)]
    assert (parts[0] == parts[1]).all()
    assert (parts[0] != parts[2]).any()


@pytest.mark.parametrize("num_parts", [4, 20])  # METIS bisects for up to 8 parts
def test_metis_parts_are_of_one_size_and_keep_more_edges_than_random_ones(num_parts):
    graph, _ = blocks_graph(1000, 20, degree_in=10, degree_out=3, seed=0)
    metis = make_partition(graph, "metis", num_parts, seed=0)
    random = make_partition(graph, "random", num_parts, seed=0)
    assert metis.balance <= 1.1
    assert metis.kept_edge_fraction > 0.6
    assert random.kept_edge_fraction == pytest.approx(1 / num_parts, abs=0.03)


@pytest.mark.parametrize("num_parts", [10, 100, 110])  # with 35, 3.5 and 3.2 training nodes each
def test_parts_can_have_their_shares_of_training_nodes_too(num_parts):
    graph, blocks = blocks_graph(1000, 20, degree_in=10, degree_out=3, seed=0)
    graph = replace(graph, split=np.where(blocks < 7, TRAIN, TEST).astype(np.int8))
    plain, shared = (make_partition(graph, m, num_parts, 0) for m in ("metis", "metis-train"))
    most = {}
    for partition in (plain, shared):
        kinds = (partition.parts[graph.split == of] for of in (TRAIN, TEST))
        shares = [np.bincount(of_kind, minlength=num_parts) for of_kind in kinds]
        most[partition.method] = [
            of.max() <= max(1.03 * of.mean(), -(-of.mean() // 1)) for of in shares
        ]
    assert most == {"metis": [False, False], "metis-train": [True, True]}
    assert plain.kept_edge_fraction > shared.kept_edge_fraction > 2.5 / num_parts  # random: 1 / k


@pytest.mark.parametrize("method", ["metis", "spectral", "walks"])
def test_two_blocks_are_found(method):
    graph, blocks = blocks_graph(400, 2, degree_in=12, degree_out=1, seed=1)
    found = make_partition(graph, method, 2, seed=3).parts
    agreement = (found == blocks).mean()
    assert max(agreement, 1 - agreement) > 0.95  # the numbers of the blocks are arbitrary


@pytest.mark.parametrize("method", ["spectral", "walks"])
def test_many_nodes_without_neighbours_are_not_one_part(method):
    """A cluster of theirs would be a part without edges, and leave too few to the others."""
    graph, _ = blocks_graph(200, 2, degree_in=12, degree_out=1, seed=1)
    with_alone = make_graph(400, graph.indices, np.repeat(np.arange(200), np.diff(graph.indptr)))
    partition = make_partition(with_alone, method, 2, seed=0)
    assert partition.balance < 1.2
    assert partition.kept_edge_fraction > 0.85


@pytest.mark.parametrize("seed", range(3))
def test_metis_keeps_edges_where_parts_have_few_nodes(seed):
    """Symptom: 38 % of Cora's edges in 200 parts, and 69 % of CiteSeer's in 20 for some seeds.

    METIS cut into k parts at once, where bisecting keeps 64 % and 92 %. In this tree, whose nodes
    mostly hang on the first ones, it is 62 % and 73 %.
    """
    nodes = np.arange(1, 1000)
    above = nodes * np.random.default_rng(0).random(999) ** 3
    tree = make_graph(1000, above.astype(int), nodes)
    assert make_partition(tree, "metis", 100, seed).kept_edge_fraction > 0.7


@every_method
def test_parts_that_cannot_be_are_refused(method):
    small = make_graph(3, [0], [1])
    rows = [(num, r"small: cannot be cut into .* from 1 to 3$") for num in (-1, 0, 4, 10**30)]
    check_refusals(rows, lambda num_parts: make_partition(small, method, num_parts, seed=0))


def test_wrong_methods_seeds_and_large_spectral_graphs_are_refused():
    path = np.arange(MOST_NODES + 1)
    small, large = make_graph(3, [0], [1]), make_graph(MOST_NODES + 1, path[:-1], path[1:])
    rows: list[Any] = [
        (
            small,
            "louvain",
            2,
            0,
            "no 'louvain' parts; choose random, .*, spectral or walks",
        ),
        (small, "metis", 2, -1, "seed of its parts is -1; choose 0 or more"),
        (large, "spectral", 2, 0, r"at most 5,000 .* 5,001 have; choose metis or walks"),
    ]
    check_refusals(rows, make_partition)
