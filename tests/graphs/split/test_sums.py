"""Sums in chunks of nodes, and over edges that travel, are those of all nodes and edges at once."""

from dataclasses import replace

import pytest
import torch

from tests.graphs.split.test_switch import GCN, SAGE
from tests.graphs.test_exactness import words_graph
from tests.world import run_each
from vigpipe.commands.check import trace
from vigpipe.graphs.split import sums
from vigpipe.parallel import shards as module
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

DIRECTED = {"data": words_graph(), "shards": 3}


def traced(rank, world_size, config, can_write):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "LEAST_COLUMNS", 2)
        if not can_write:
            patch.setattr(module, "this_machine", lambda: f"machine {rank}")
        run = prepare(config, torch.float64)
        state = make_rank_state(run, rank, torch.device("cpu"))
        assert state.mesh.shards.can_write == can_write
        found = trace(state, 3), dict(state.mesh.shards.sent)
        state.feed.close()
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "base",
    [
        replace(GCN, **DIRECTED),
        replace(SAGE, data=words_graph(weighted=False), shards=3),
        replace(SAGE, **DIRECTED, aggregator=None),
        replace(GCN, **DIRECTED, model="gin"),
    ],
    ids=["gcn", "sage max", "sage", "gin"],
)
def test_training_does_not_depend_on_chunks_nor_on_who_keeps_the_edges(base):
    kept = replace(base, adjacency="split")
    configs = [base, replace(base, chunks=4), kept, base, kept]
    writes = [False] * 3 + [True] * 2
    found = [of_first for of_first, *_ in run_each(traced, 3, configs, writes)]
    for place, first in ((1, 0), (2, 0), (4, 3)):
        (ours, sent), (whole, of_whole) = found[place], found[first]
        for kind in ("loss", "weights"):
            for name, expected in whole[kind].items():
                assert torch.equal(ours[kind][name], expected)
        assert sent["switches"] == of_whole["switches"]
