"""Samplers by their options, and graphs that they cannot draw from."""

from dataclasses import replace

import numpy as np
import pytest

from tests.graphs.partitions.small_graphs import make_graph
from tests.graphs.samplers.matrices import GRAPH
from vigpipe.config.choices import SAMPLERS
from vigpipe.config.options import TrainConfig, with_model_defaults
from vigpipe.errors import InputError
from vigpipe.graphs.graph import TRAIN
from vigpipe.graphs.samplers.layered import InLayers
from vigpipe.graphs.samplers.make import make_sampler


def made(graph=GRAPH, **options):
    return make_sampler(with_model_defaults(TrainConfig(**{"model": "gcn", **options})), graph)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_defaults_are_for_small_graphs_too(sampler):
    found, partition = made(sampler=sampler)
    assert (partition is not None) == (sampler == "parts")
    assert found.takes_all == (sampler == "full")
    assert found.most_nodes <= GRAPH.num_nodes
    nodes, adjacency, _ = found.draw(1, 0)
    assert len(nodes) == adjacency.num_sources == found.num_nodes(1, 0)
    assert (found.describe() == "") == (sampler == "full")


def test_one_fanout_is_for_all_layers_and_several_go_from_the_last_one_back():
    for fanout, expected in (("3", [3, 3]), ("1,4", [4, 1])):
        sampler = made(sampler="neighbour", fanout=fanout, batch_nodes=99).sampler
        assert isinstance(sampler, InLayers)
        layers = [sampler.draw(1, 0).adjacency.of_layer(i) for i in (0, 1)]
        assert [int(layer.in_degrees.max()) for layer in layers] == expected


@pytest.mark.parametrize("sampler", ["saint-edge", "fastgcn"])
def test_a_graph_without_edges_is_refused_where_edges_are_drawn(sampler):
    nothing = replace(make_graph(3, [], []), split=np.full(3, TRAIN, np.int8))
    with pytest.raises(InputError, match=f"--sampler {sampler}: draws edges, and small has none"):
        made(nothing, sampler=sampler)


@pytest.mark.parametrize("sampler", ["neighbour", "fastgcn"])
def test_a_graph_without_training_nodes_is_refused_where_these_are_taken(sampler):
    with pytest.raises(InputError, match=f"--sampler {sampler}: takes the training nodes of a gr"):
        made(make_graph(3, [0], [1]), sampler=sampler)
