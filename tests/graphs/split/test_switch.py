"""The bytes of the way between the two forms of what ranks share, and its statistics."""

from dataclasses import replace

import pytest
import torch

from tests.world import run_each
from vigpipe.config.options import TrainConfig
from vigpipe.job.shared_norm import shared_batch_norm
from vigpipe.model.norm import BatchNorm
from vigpipe.parallel.shards import Shards
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import train_step


def test_the_statistics_of_all_rows_are_not_read_by_the_host():
    """The number of rows was, at every norm, so that a GPU waited; reading `meta` is an error."""
    norm, x = BatchNorm(3).to("meta"), torch.empty(4, 3, device="meta", requires_grad=True)
    shared_batch_norm(norm, x, Shards()).sum().backward()
    assert x.grad is not None


LAYERS, NODES, FEATURES = 3, 203, 9
SAGE = TrainConfig(
    model="sage",
    aggregator="max",
    data=f"sbm:{NODES},4,{FEATURES},5",
    layers=LAYERS,
    width=12,
    dtype="float64",
    steps=20,
)
GCN = replace(SAGE, model="gcn", aggregator=None, width=8)
GAT = replace(SAGE, model="gat", aggregator=None, heads=2)


def sent(rank, world_size, config):
    """Bytes that this rank gives to others in the second step."""
    torch.set_num_threads(1)
    run = prepare(replace(config, shards=world_size), torch.float64)
    state = make_rank_state(run, rank, torch.device("cpu"))
    first, second, *_ = batches(state)
    train_step(state, first)
    before = dict(state.mesh.shards.sent)
    train_step(state, second)
    state.feed.close()
    return {what: n - before[what] for what, n in state.mesh.shards.sent.items()}


def traffic(size: int, configs: list[TrainConfig]) -> list[dict[str, int]]:
    """Bytes that so many ranks give to one another in a step of each configuration."""
    by_config = run_each(sent, size, configs)
    return [{what: sum(of[what] for of in by_rank) for what in by_rank[0]} for by_rank in by_config]


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_the_bytes_of_a_step_are_those_of_the_formulas_and_hardly_grow_with_the_ranks():
    totals = {}
    for size in (2, 4):
        sage, gcn, gat = traffic(size, [SAGE, GCN, GAT])
        share = (size - 1) / size

        def switches(channels, share=share):
            """Bytes in which so many channels of all nodes change hands: about, as 203 is odd."""
            return pytest.approx(8 * share * NODES * channels, rel=0.01)

        # phi n (d_0 + 4 (d_1 + ... + d_(L - 1))): the maximum is taken of what a layer gets, and
        # the columns of the features are kept after the first step.
        assert sage == {"switches": switches(FEATURES + 4 * (LAYERS - 1) * 12)}
        # What gcn sums is the narrower side of each layer: 8, 8 and 4 of 9 -> 8 -> 8 -> 4 classes.
        assert gcn == {"switches": switches(4 * (8 + 8 + 4))}
        # The scores of both ends of two heads, and of one in the last layer, go to all others, and
        # their gradients come back.
        assert gat["switches"] == switches(4 * (12 + 12 + 4))
        assert gat["scores"] == 2 * 8 * (size - 1) * NODES * 2 * (2 + 2 + 1)
        totals[size] = sage["switches"]
    assert totals[4] / totals[2] == pytest.approx(1.5, rel=0.01)
