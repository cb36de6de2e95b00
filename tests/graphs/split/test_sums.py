"""Sums in chunks of nodes, and over edges that travel, are those of all nodes and edges at once."""

from dataclasses import replace

import pytest
import torch

from tests.graphs.split.test_halo import random_graph
from tests.graphs.split.test_switch import GCN, SAGE
from tests.parallel.test_shards import shards_of_all
from tests.world import run_each, run_ranks
from vigpipe.commands.check import trace
from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.split import sums
from vigpipe.graphs.split.mixed import MixedEdges
from vigpipe.graphs.split.travelling import EDGES, TravellingEdges
from vigpipe.model.gnn.edges import Edges
from vigpipe.ops.adjacency import Adjacency
from vigpipe.parallel import shards as module
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
NODES, EDGE_COUNT, CHANNELS = 31, 200, 13


def reduced(edges, rows):
    """All that edges bring, and the gradient of each."""
    found = []
    looped = edges.with_loops()
    bias = torch.linspace(-1, 1, CHANNELS, dtype=torch.float64, requires_grad=True)
    ways = [
        lambda x: edges.sums(x, "ones"),
        lambda x: edges.sums(x, "mean", x.cos()),
        lambda x: looped.sums(x, "gcn", bias),
        lambda x: edges.own_and_mean(torch.cat((x, x.cos()), 1)),
        lambda x: edges.maximum(x),
        lambda x: looped.maximum(x),
    ]
    for way in ways:
        x = rows.clone().requires_grad_()
        y = way(x)
        y.sin().sum().backward()
        found += [y.detach(), x.grad]
    return [*found, bias.grad]


def ways_to_sum(rank, world_size):
    """The same sums with all edges at once, in chunks, and with edges that travel."""
    torch.set_num_threads(1)
    sums.LEAST_COLUMNS = 2
    shards = shards_of_all(world_size)
    assert shards.can_write
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, generator=generator)
    graph, rows = random_graph(NODES, EDGE_COUNT), x[shards.own(NODES)]
    whole = reduced(MixedEdges(graph, shards, chunks=3), rows)
    travelling = reduced(TravellingEdges(graph, shards, CPU), rows)
    shards._windows = {}
    by_chunks = [reduced(MixedEdges(graph, shards, chunks=n), rows) for n in (1, 5, NODES)]
    for other in (travelling, *by_chunks):
        for ours, wanted in zip(other, whole, strict=True):
            assert torch.equal(ours, wanted)
    return shards.sent[EDGES]


@pytest.mark.multiprocess
def test_sums_in_chunks_and_over_edges_that_travel_have_the_bits_of_those_over_all_edges():
    sent = sum(run_ranks(ways_to_sum, 3))
    graph = random_graph(NODES, EDGE_COUNT)
    looped = graph.with_loops()
    # Where rows begin, and sources, both of 4 bytes; the blocks of all ranks have 3 rows' ends.
    plain, with_loops = (4 * (g.num_edges + NODES + 3) for g in (graph, looped))
    # 2 pieces each: sums go forwards and backwards, and maxima forwards only.
    assert sent == 2 * ((3 * 4 + 1) * plain + (1 * 4 + 1) * with_loops)


def test_a_chunk_waits_for_the_last_one_that_it_has_edges_from():
    # 0 -> 1 -> ... -> 11 in a row, and 11 -> 11; two ranks with six nodes each.
    indptr = torch.tensor([0, *range(11), 12])
    path = Adjacency(indptr, torch.tensor([*range(11), 11]))
    chunks = Chunks(3, [slice(0, 6), slice(6, 12)])
    assert chunks.rows == [
        [slice(0, 2), slice(6, 8)],
        [slice(2, 4), slice(8, 10)],
        [slice(4, 6), slice(10, 12)],
    ]
    assert [chunks.local(of_chunk, 1) for of_chunk in chunks.rows] == [
        *(slice(0, 2), slice(2, 4), slice(4, 6)),
    ]
    assert chunks.last_needed(path) == [2, 1, 2]  # node 6 has an edge from node 5
    alone = Chunks(3, [slice(0, 12)])
    assert alone.last_needed(path) == [0, 1, 2]
    nothing = Adjacency(torch.zeros(13, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert alone.last_needed(nothing) == [-1, -1, -1]


def multiplied(edges, rows):
    """Products that are summed, with all that can be added, and gradients of all that goes in."""
    generator = torch.Generator().manual_seed(4)
    shapes = (CHANNELS - 2, CHANNELS), (CHANNELS - 2,), (CHANNELS - 2, CHANNELS)
    weight, bias, own = (torch.randn(s, dtype=rows.dtype, generator=generator) for s in shapes)
    inputs = [tensor.requires_grad_() for tensor in (rows.clone(), weight, bias, own)]
    x = inputs[0]
    ways = [
        edges.product_then_sums(x, weight, "mean"),
        edges.product_then_sums(x, weight, "ones", x @ own.T, itself=1 + bias[:1]),
        edges.product_then_sums(x, weight, "ones", x @ own.T),
        edges.with_loops().product_then_sums(x, weight, "gcn", bias, beside=(x, own)),
    ]
    of_weights, of_rows = [], []
    for y in ways:
        d_x, *grads = torch.autograd.grad(y.sin().sum(), inputs, allow_unused=True)
        of_rows += [y.detach(), d_x]
        of_weights += [torch.zeros(()) if grad is None else grad for grad in grads]
    return of_rows, of_weights


def ways_to_multiply(rank, world_size):
    """Products written where they are summed, and the rows that this rank has of them."""
    torch.set_num_threads(1)
    sums.LEAST_COLUMNS = 2
    shards = shards_of_all(world_size)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, generator=generator)
    graph, rows = random_graph(NODES, EDGE_COUNT), x[shards.own(NODES)]
    makers = [MixedEdges(graph, shards), TravellingEdges(graph, shards, CPU)]
    assert all(edges.overlaps for edges in makers)
    found = [multiplied(edges, rows) for edges in makers]
    shards._windows = {}
    edges = MixedEdges(graph, shards)
    assert not edges.overlaps
    return [*found, multiplied(edges, rows)], multiplied(Edges(graph), x)


@pytest.mark.multiprocess
def test_products_that_are_written_where_they_are_summed_are_those_of_one_rank():
    of_ranks, (wanted, *_) = zip(*run_ranks(ways_to_multiply, 3), strict=True)
    for ways in zip(*of_ranks, strict=True):
        rows = [torch.cat(parts) for parts in zip(*(of_rows for of_rows, _ in ways), strict=True)]
        weights = [sum(grads) for grads in zip(*(of for _, of in ways), strict=True)]
        for ours, theirs in zip((*rows, *weights), (*wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def traced(rank, world_size, config):
    torch.set_num_threads(1)
    module.this_machine = lambda: f"machine {rank}"  # so that ranks send
    state = make_rank_state(prepare(config, torch.float64), rank, CPU)
    assert not state.shards.can_write
    found = trace(state, 3), dict(state.shards.sent)
    state.feed.close()
    return found


@pytest.mark.multiprocess
def test_training_does_not_depend_on_chunks_nor_on_who_keeps_the_edges():
    ways = [{}, {"chunks": 4}, {"adjacency": "split"}]
    bases = [replace(base, width=130, shards=2) for base in (GCN, SAGE)]
    configs = [replace(base, **way) for base in bases for way in ways]
    found = [of_first for of_first, _ in run_each(traced, 2, configs)]
    for first in (0, len(ways)):
        (whole, sent), *others = found[first : first + len(ways)]
        for other, of_other in others:
            assert other.losses == whole.losses
            for name, weights in whole.weights.items():
                assert torch.equal(other.weights[name], weights)
            assert of_other["switches"] == sent["switches"]
