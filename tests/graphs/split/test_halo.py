"""What a rank has of a graph in parts, and what the ranks exchange for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.graphs.split.test_switch import GCN, SAGE, traffic
from tests.parallel.test_shards import shards_of_all
from tests.world import run_each, run_ranks
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.samplers.make import make_rank_parts
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.graphs.split.halo import Halo, HaloEdges, make_halo
from vigpipe.graphs.split.stale import StaleHalos
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse import constant_sum
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import train_step


def random_graph(num_nodes: int, num_edges: int, *, weighted: bool = True) -> Adjacency:
    """Draw a directed graph, with loops."""
    draws = np.random.default_rng(5)
    keys = np.unique(draws.integers(num_nodes**2, size=num_edges))
    targets, sources = np.divmod(keys, num_nodes)
    indptr = np.searchsorted(targets, np.arange(num_nodes + 1))
    weights = draws.uniform(0.2, 3, len(keys)).astype(np.float32)
    edges = torch.from_numpy(indptr), torch.from_numpy(sources)
    return Adjacency(*edges, edge_weights=torch.from_numpy(weights) if weighted else None)


KINDS: list[Any] = ["ones", "mean", "gcn"]


def sources_of(graph: Adjacency, node: int) -> list[int]:
    first, last = (int(graph.indptr[node + i]) for i in (0, 1))
    return graph.indices[first:last].tolist()


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_the_bytes_of_a_step_are_one_row_a_part_and_boundary_node():
    size = 3
    configs = [replace(config, split="halo") for config in (SAGE, GCN)]
    job = prepare(configs[0], torch.float64).job
    assert isinstance(job, GraphJob)
    graph = job.graph
    parts = make_rank_parts(configs[0], graph, size).parts
    halo = make_halo(all_edges(graph), parts, 0)
    pairs = {
        (int(source), int(parts[target]))
        for target in range(graph.num_nodes)
        for source in graph.sources()[graph.indptr[target] : graph.indptr[target + 1]]
        if parts[source] != parts[target]
    }
    assert halo.counts.sum() == len(pairs)
    sage, gcn = traffic(size, configs)
    # There and back for what each layer sums; sage keeps the halo of the features.
    assert sage == {"halos": 8 * len(pairs) * 2 * (12 + 12)}
    assert gcn == {"halos": 8 * len(pairs) * 2 * (8 + 8 + 4)}


@pytest.mark.parametrize("weighted", [False, True])
def test_sampled_halos_are_the_same_on_all_ranks_and_right_on_average(weighted):
    num_nodes, num_parts, rate, num_draws = 60, 3, 0.4, 400
    graph = random_graph(num_nodes, 300, weighted=weighted)
    parts = np.random.default_rng(1).integers(num_parts, size=num_nodes)
    halos = [make_halo(graph, parts, part) for part in range(num_parts)]
    nodes = [np.concatenate((h.nodes, halo_nodes(graph, parts, h))) for h in halos]
    x = torch.randn(num_nodes, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = {kind: constant_sum(graph, x, kind)[halos[0].nodes] for kind in KINDS}
    mean = {kind: torch.zeros_like(of_kind) for kind, of_kind in want.items()}
    for draw in range(num_draws):
        some = [halo.sampled(rate, np.random.default_rng(draw)) for halo in halos]
        rows = [received(some, nodes, part) for part in range(num_parts)]
        for part, (of, halo) in enumerate(zip(rows, some, strict=True)):
            assert set(of) <= set(nodes[part])
            assert len(of) == halo.length(part) == halo.edges.num_sources
        for kind, of_kind in mean.items():
            of_kind += constant_sum(some[0].edges, x[rows[0]], kind) / num_draws
    everything = halos[0].sampled(1.0, np.random.default_rng(0))
    for kind, of_kind in want.items():
        assert (mean[kind] - of_kind).abs().max() < 0.15 * of_kind.abs().max()
        torch.testing.assert_close(constant_sum(everything.edges, x[nodes[0]], kind), of_kind)


def halo_nodes(graph: Adjacency, parts: np.ndarray, halo: Halo) -> list[int]:
    """Nodes of other parts with edges into a part, by part and node."""
    sources = {s for t in halo.nodes for s in sources_of(graph, t)} - set(halo.nodes.tolist())
    return sorted(sources, key=lambda node: (parts[node], node))


def received(halos: list[Halo], nodes: list[np.ndarray], to: int) -> list[int]:
    """The nodes whose rows a part sums over when all give what they are to give."""
    rows = halos[to].nodes.tolist()
    for of, halo in enumerate(halos):
        if of != to:
            given = halo.given[to].tolist()
            assert len(given) == halos[to].counts[of, to]
            rows += nodes[of][given].tolist()
    return rows


def stale_rows(rank, world_size):
    """Three steps of two ranks in which row r of rank k is 100 step + 10 k + r."""
    torch.set_num_threads(1)
    graph = Adjacency(torch.tensor([0, 1, 2, 3, 4]), torch.tensor([2, 1, 0, 1]))
    parts, shards = np.array([0, 0, 1, 1]), shards_of_all(world_size)
    halo, stale = make_halo(graph, parts, rank), StaleHalos()
    edges, found = HaloEdges(halo, shards, stale=stale), []
    for step in range(3):
        stale.begin_step()
        x = 100.0 * step + 10 * rank + torch.arange(2.0)[:, None]
        x.requires_grad_()
        rows = edges._with_halo(x)
        (rows * (1 + rank) * 10**step).sum().backward()
        assert x.grad is not None
        with torch.no_grad():
            now = edges._with_halo(x)  # evaluations do not wait
        found.append((rows[2:, 0].tolist(), now[2:, 0].tolist(), x.grad[:, 0].tolist()))
    stale.finish()
    return found


@pytest.mark.multiprocess
def test_stale_halos_and_their_gradients_are_those_of_the_step_before():
    # Node 0 takes from node 2, node 2 from 0 and node 3 from 1: rank 0 gives its nodes 0 and 1,
    # and rank 1 its first, node 2.
    zero, one = run_ranks(stale_rows, 2)
    assert [rows for rows, _, _ in zero] == [[10.0], [10.0], [110.0]]
    assert [rows for _, rows, _ in zero] == [[10.0], [110.0], [210.0]]
    assert [rows for rows, _, _ in one] == [[0.0, 1.0], [0.0, 1.0], [100.0, 101.0]]
    # A row's own gradient, and that of the other rank in the step before.
    assert [grad for _, _, grad in zero] == [[1 + 2] * 2, [10 + 2] * 2, [100 + 20] * 2]
    assert [grad for _, _, grad in one] == [[2 + 1, 2], [20 + 1, 20], [200 + 10, 200]]


def losses(rank, world_size, config):
    torch.set_num_threads(1)
    state = make_rank_state(prepare(config, torch.float64), rank, torch.device("cpu"))
    found = [train_step(state, batch).loss for batch in batches(state)]
    state.feed.close()
    return found


@pytest.mark.multiprocess
def test_other_halos_learn_too_and_are_exact_where_nothing_is_late_or_left_out():
    base = replace(GCN, shards=2, split="halo", lr=0.02, steps=8)
    still = replace(base, opt="sgd", lr=0.0)
    configs = [replace(c, halo=h) for c in (base, still) for h in ("exact", "stale")]
    configs += [replace(base, halo=f"sampled:{rate}") for rate in (1, 0.5)]
    of_first_rank = [of_first for of_first, _ in run_each(losses, 2, configs)]
    exact, stale, exact_still, stale_still, all_of, half = of_first_rank
    # Where no weight changes, the last step's features are this one's.
    assert stale_still == exact_still
    assert stale[0] == exact[0]
    assert all_of == pytest.approx(exact, rel=1e-10)
    for other in (stale, half):
        assert other != pytest.approx(exact, rel=1e-10)
        assert abs(other[-1] - exact[-1]) < 0.3 * (exact[0] - exact[-1])
