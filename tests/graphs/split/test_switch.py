"""The two forms of what ranks share, and the bytes that the way between them takes."""

from dataclasses import replace

import pytest
import torch

from tests.parallel.test_shards import shards_of_all
from tests.world import run_each, run_ranks
from vigpipe.config.options import TrainConfig
from vigpipe.job.shared_norm import shared_batch_norm
from vigpipe.model.norm import BatchNorm
from vigpipe.parallel.shards import Shards
from vigpipe.parallel.switch import all_rows, to_columns, to_rows, total
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import train_step

NUM_ROWS, HEADS, OF_HEAD = 11, 2, 5  # neither is divisible by 2, 3 or 4
NUM_CHANNELS = HEADS * OF_HEAD


def whole(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, NUM_CHANNELS, dtype=torch.float64, generator=generator)


def switched(rank, world_size):
    """Go from rows to columns and back; then the other way round. Gradients go back likewise."""
    torch.set_num_threads(1)
    shards = shards_of_all(world_size)
    rows = whole(0)[shards.own(NUM_ROWS)].requires_grad_()
    columns = to_columns(rows, shards, NUM_ROWS, HEADS)
    back = to_rows(columns, shards, NUM_CHANNELS, HEADS)
    (back * whole(1)[shards.own(NUM_ROWS)]).sum().backward()
    own = whole(0).unflatten(1, (HEADS, OF_HEAD))[..., shards.own(OF_HEAD)].flatten(1)
    assert torch.equal(columns, own)
    assert torch.equal(back, rows)
    assert rows.grad is not None
    assert torch.equal(rows.grad, whole(1)[shards.own(NUM_ROWS)])

    everything = all_rows(rows, shards, NUM_ROWS)
    assert torch.equal(everything, whole(0))
    rows.grad.zero_()
    (everything * (rank + 1)).sum().backward()  # each rank has a share of the loss
    assert rows.grad.eq(sum(range(1, world_size + 1))).all()

    x = torch.full((2,), rank + 1.0, requires_grad=True)
    y = total(x, shards)
    (y * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert y.tolist() == x.grad.tolist() == [sum(range(1, world_size + 1))] * 2
    return norms(shards)


def norms(shards):
    """BatchNorm of the rank's rows: its result, gradients, and running statistics."""
    norm = BatchNorm(NUM_CHANNELS).double()
    rows = whole(0)[shards.own(NUM_ROWS)].requires_grad_()
    y = shared_batch_norm(norm, rows, shards)
    (y * whole(1)[shards.own(NUM_ROWS)]).sum().backward()
    return y.detach(), rows.grad, norm.weight.grad, norm.bias.grad, norm.state_dict()


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.heavy)])
def test_there_and_back_is_nothing_and_batch_norm_sees_all_rows(size):
    by_rank = run_ranks(switched, size)
    norm, x = BatchNorm(NUM_CHANNELS).double(), whole(0).requires_grad_()
    y = norm(x)
    (y * whole(1)).sum().backward()
    ours, d_x, d_weight, d_bias, states = zip(*by_rank, strict=True)
    torch.testing.assert_close(torch.cat(ours), y.detach())
    torch.testing.assert_close(torch.cat(d_x), x.grad)
    torch.testing.assert_close(sum(d_weight), norm.weight.grad)
    torch.testing.assert_close(sum(d_bias), norm.bias.grad)
    for state in states:
        torch.testing.assert_close(state, dict(norm.state_dict()))


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
    before = dict(state.shards.sent)
    train_step(state, second)
    state.feed.close()
    return {what: n - before[what] for what, n in state.shards.sent.items()}


def traffic(size: int, configs: list[TrainConfig]) -> list[dict[str, int]]:
    """Bytes that so many ranks give to one another in a step of each configuration."""
    by_config = run_each(sent, size, configs)
    return [{what: sum(of[what] for of in by_rank) for what in by_rank[0]} for by_rank in by_config]


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_the_bytes_of_a_step_are_those_of_the_formulas_and_hardly_grow_with_the_ranks():
    totals = {}
    for size in (2, 3, 4):
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
