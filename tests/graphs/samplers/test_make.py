"""Samplers by their options, and graphs that they cannot draw from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.graphs.partitions.small_graphs import make_graph
from tests.graphs.samplers.matrices import GRAPH
from tests.refusals import check_refusals
from vigpipe.config.choices import SAMPLERS
from vigpipe.config.demands import filled_in
from vigpipe.config.options import TrainConfig, with_model_defaults
from vigpipe.graphs.graph import NO_SPLIT, TRAIN
from vigpipe.graphs.samplers.make import make_sampler
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.ops.adjacency import Layered


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))


def made(graph=GRAPH, **options: Any):
    options = {"model": "gcn", **options}
    config = with_model_defaults(TrainConfig(**options))
    return make_sampler(filled_in(config), graph)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_defaults_are_for_small_graphs_too(sampler):
    found = made(sampler=sampler)
    assert isinstance(found, Parts) == (sampler == "parts")
    assert found.takes_all == (sampler == "full")
    assert found.most_nodes <= GRAPH.num_nodes
    nodes, adjacency, _ = found.draw(1, 0)
    assert len(nodes) == adjacency.num_sources == found.num_nodes(1, 0)
    assert (found.describe() == "") == (sampler == "full")
    kept = found.as_table()["kept_edge_fraction"]
    assert isinstance(kept, float)
    assert 0 < kept <= 1


def test_kept_edges_are_those_that_end_in_the_nodes_of_sub_graphs():
    degrees = np.diff(GRAPH.indptr)

    def kept(**options):
        sampler = made(**options)
        table = sampler.as_table()
        num_kept = num_ending = 0
        for number in range(*sampler.num_sub_graphs):
            nodes, adjacency, _ = sampler.draw(1, number)
            for layer in adjacency.layers if isinstance(adjacency, Layered) else [adjacency]:
                num_kept += layer.num_edges
                num_ending += degrees[nodes[: layer.num_targets]].sum()
        return table["kept_edge_fraction"], num_kept / num_ending

    for options in (
        {"sampler": "parts", "partition": "random", "parts": 7, "merge": 3},
        {"sampler": "neighbour", "fanout": "3,2", "batch_nodes": 10},
        {"sampler": "fastgcn", "layer_nodes": 9, "batch_nodes": 10},
    ):
        found, expected = kept(**options)
        assert found == pytest.approx(expected, rel=1e-12), options
    found, expected = kept(sampler="saint-walk", roots=4, walk_length=2, coverage=200)
    assert found == pytest.approx(expected, rel=0.25)  # of others than those that were counted


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "saint-node", "sample_nodes": 30},
        {"sampler": "saint-edge", "sample_edges": 9},
        {"sampler": "saint-walk", "roots": 4, "walk_length": 2},
    ],
    ids=["node", "edge", "walk"],
)
def test_who_asks_later_reads_what_was_counted(options):
    def told(**more):
        sampler = made(**{"model": "sage", **options, **more})
        weights = sampler.draw(1, 0).weights
        assert weights is not None
        return "and read from a file" in sampler.describe(), weights.tolist()

    (first, weights), (second, same) = told(), told()
    assert (first, second, weights) == (False, True, same)
    for name, value in options.items():
        if name != "sampler":
            assert not told(**{name: value + 1})[0]
    assert told(model="gin")[0]
    assert told(model="gcn")[0] == (options["sampler"] != "saint-node")  # which goes by its weights


def test_a_graph_without_what_is_drawn_is_refused():
    nothing = replace(make_graph(3, [], []), split=np.full(3, TRAIN, np.int8))
    untrained = make_graph(3, [0], [1])
    apart = replace(untrained, split=np.array([NO_SPLIT, NO_SPLIT, TRAIN], np.int8))
    rows = [
        (nothing, "saint-edge", "--sampler saint-edge: draws edges, and small has none"),
        (nothing, "fastgcn", "--sampler fastgcn: draws edges, and small has none"),
        (apart, "saint-edge", "ends of edges, and no training node of small has one, of 1;"),
        (untrained, "neighbour", "--sampler neighbour: takes the training nodes of a gr"),
        (untrained, "fastgcn", "--sampler fastgcn: takes the training nodes of a gr"),
    ]
    check_refusals(rows, lambda graph, sampler: made(graph, sampler=sampler))
