"""Sub-graphs: each part once an epoch, with exactly the edges between its nodes."""

import numpy as np
import pytest

from vigpipe.graphs.graph import TRAIN
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.graphs.samplers.whole import WholeGraph
from vigpipe.graphs.sbm import draw
from vigpipe.ops.adjacency import Adjacency

GRAPH = draw("sbm:300,3,8,6", seed=2)
PARTITION = make_partition(GRAPH, "random", 10, 2)
FIXED = Generations(GRAPH, PARTITION, None, 5)


def edges_between(nodes: np.ndarray) -> set[tuple[int, int]]:
    targets = np.repeat(np.arange(GRAPH.num_nodes), np.diff(GRAPH.indptr))
    is_in = np.isin(targets, nodes) & np.isin(GRAPH.indices, nodes)
    return set(zip(GRAPH.indices[is_in].tolist(), targets[is_in].tolist(), strict=True))


@pytest.mark.parametrize("num_joined", [1, 3, 10])
def test_an_epoch_takes_every_part_once_with_all_edges_inside(num_joined):
    sampler = Parts(GRAPH, FIXED, num_joined, seed=5)
    assert sampler.num_sub_graphs == (-(-10 // num_joined),)
    for epoch in (1, 2):
        drawn = [sampler.draw(epoch, number) for number in range(*sampler.num_sub_graphs)]
        assert sorted(np.concatenate([s.nodes for s in drawn]).tolist()) == list(range(300))
        for number, (nodes, adjacency, weights) in enumerate(drawn):
            assert isinstance(adjacency, Adjacency)
            assert weights is None
            assert (np.diff(nodes) > 0).all()
            assert len(nodes) <= sampler.most_nodes
            sources, targets = nodes[adjacency.indices.numpy()], nodes[adjacency.targets.numpy()]
            found = set(zip(sources.tolist(), targets.tolist(), strict=True))
            assert found == edges_between(nodes)
            is_train = (GRAPH.split[nodes] == TRAIN).sum()
            assert sampler.num_nodes(epoch, number) == len(nodes)
            assert sampler.num_training_nodes(epoch, number) == is_train
            assert sampler.num_edges(epoch, number) == len(found) == adjacency.num_edges


@pytest.mark.parametrize("num_joined", [1, 2])
def test_parts_of_its_own_go_to_no_other_replica(num_joined):
    sampler = Parts(GRAPH, FIXED, num_joined, seed=5, num_groups=3)
    assert sampler.num_sub_graphs == ((4, 3, 3) if num_joined == 1 else (2, 2, 2))
    orders = []
    for epoch in (1, 2):
        drawn = [sampler.draw(epoch, number).nodes for number in range(sum(sampler.num_sub_graphs))]
        orders.append([nodes.tolist() for nodes in drawn])
        assert max(map(len, drawn)) <= sampler.most_nodes
        ends = np.cumsum(sampler.num_sub_graphs)
        for share, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            nodes = np.concatenate(drawn[start:end])
            own = np.flatnonzero(PARTITION.parts % 3 == share)
            assert sorted(nodes.tolist()) == own.tolist()
    assert orders[0] != orders[1]


def test_the_whole_graph_comes_once_an_epoch():
    sampler = WholeGraph(GRAPH)
    assert (sampler.num_sub_graphs, sampler.most_nodes) == ((1,), 300)
    nodes, adjacency, _ = sampler.draw(4, 0)
    assert nodes.tolist() == list(range(300))
    assert adjacency.num_edges == GRAPH.num_edges
    assert sampler.num_nodes(4, 0) == 300
    assert sampler.num_training_nodes(4, 0) == (GRAPH.split == TRAIN).sum()
    assert sampler.num_edges(4, 0) == GRAPH.num_edges
