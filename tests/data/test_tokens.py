"""Ranks that share the nodes of every image train like one process that has whole images.

Neither the rows of nodes (9, then 5) nor those of candidates are divisible by the ranks. In float64
no near tie of a kNN graph flips; in float32 the graphs are fixed, and there is no BatchNorm: the
readout's, of three samples, would magnify rounding.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parallel.test_shards import shards_of_all
from tests.refusals import check_refusals
from tests.world import GUARD, run_ranks
from vigpipe.commands.check import trace
from vigpipe.commands.differences import differences
from vigpipe.config.options import TrainConfig
from vigpipe.data import tokens as module
from vigpipe.data.tokens import SplitTokens
from vigpipe.model.blocks import VigShape
from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.model.vig import VisionGnn
from vigpipe.parallel.shards import Shards
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

B, CLASSES, STEPS = 3, 5, 2
SIZE = (18, 14)  # pixels; 9 x 7 nodes at stride 2
FLAT = VigShape((2,), (16,), k=(3, 4), stem=(2, 1), stem_stride=2, img_size=SIZE)
# 63 nodes choose from 20 candidates by 24 channels, then 20 nodes from 20 by 16: both ways.
PYRAMID = VigShape(
    (2, 1), (24, 16), (3, 4), reductions=(2, 1), relative=True, stem=(2, 1), stem_stride=2,
    img_size=SIZE,
)  # fmt: skip


class Setup(NamedTuple):
    shape: VigShape
    options: dict[str, Any]
    dtype: torch.dtype = torch.float64
    recompute: bool = False
    most_distances: int = 1 << 12  # or distances of so few nodes would be made in one piece


SETUPS = {
    "max": Setup(FLAT, {"aggregator": "max"}),
    "edge layer": Setup(FLAT, {"aggregator": "edge,maxmean", "norm": "layer"}),
    "draws": Setup(
        FLAT,
        {"aggregator": "sage", "drop_path_rate": 0.4, "drop_rate": 0.3, "stochastic_dilation": 0.5},
    ),
    "recompute": Setup(FLAT, {"aggregator": "gin", "graph": "knn,reuse"}, recompute=True),
    "window": Setup(FLAT, {"aggregator": "edge,max", "graph": "window", "norm": "group"}),
    "float32": Setup(FLAT, {"graph": "grid", "norm": "group"}, torch.float32),
    "pyramid": Setup(PYRAMID, {"aggregator": "max,maxmean,sage"}),
    "pyramid edge": Setup(PYRAMID, {"aggregator": "edge,gin,max", "graph": "lookahead"}),
    # Ranks with fewer nodes than others have pieces without any.
    "a node at a time": Setup(PYRAMID, {"aggregator": "max"}, most_distances=1),
    "pyramid draws": Setup(PYRAMID, {"stochastic_dilation": 0.5, "norm": "group"}),
}


def trained(setup: Setup, shards: Shards):
    """Take steps; the logits of the last one, in evaluation, the loss, gradients and weights."""
    torch.manual_seed(0)
    model = VisionGnn(setup.shape, CLASSES, **setup.options).to(setup.dtype)
    model.set_grad_checkpointing(setup.recompute)
    if shards.size > 1:
        model.share_tokens(SplitTokens(shards))
    images = torch.rand(B, 3, *SIZE, dtype=setup.dtype)
    labels = torch.randint(CLASSES, (B,))
    logits = loss = torch.empty(())
    gradients: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        logits = model(images, sample_keys(0, step, torch.arange(B)))
        loss = F.cross_entropy(logits, labels)
        model.zero_grad()
        (loss * (shards.rank == 0)).backward()  # as with labels on the first rank only
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if shards.size > 1:
                dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad.clone()
            parameter.data -= 0.01 * parameter.grad
    graphs = model(images, sample_keys(0, 9, torch.arange(B)), return_graph=True)[1]
    model.eval()
    with torch.no_grad():
        scored = model(images)
    of_blocks = {name: graph.neighbours for name, graph in graphs.items()}
    return (logits.detach(), loss.detach(), scored, gradients, model.state_dict()), of_blocks


def of_rank(rank, world_size):
    torch.set_num_threads(1)
    shards, found = shards_of_all(world_size), {}
    for name in BY_SIZE[world_size]:
        setup = SETUPS[name]
        before, module.MOST_DISTANCES = dict(shards.sent), setup.most_distances
        results = trained(setup, shards)
        found[name] = (*results, {w: n - before.get(w, 0) for w, n in shards.sent.items()})
    return found


@cache
def of_all(size: int) -> list[dict[str, Any]]:
    return run_ranks(of_rank, size)


# More ranks differ in how many nodes, pieces and messages each has.
BY_SIZE = {2: list(SETUPS), 4: ["max", "pyramid", "a node at a time"]}


def sized(size: int, *more: Any) -> Any:
    return pytest.param(size, *more, marks=[pytest.mark.heavy] if size > 2 else [])


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("size", "name"), [sized(size, name) for size, names in BY_SIZE.items() for name in names]
)
def test_ranks_with_rows_of_nodes_train_like_one(size, name):
    setup = SETUPS[name]
    whole, graphs = trained(setup, Shards())
    tolerance = 1e-10 if setup.dtype == torch.float64 else 1e-5
    for found in of_all(size):
        ours, of_blocks, _ = found[name]
        torch.testing.assert_close(ours, whole, rtol=tolerance, atol=tolerance)
        for block, graph in graphs.items():
            assert torch.equal(of_blocks[block], graph)


def sent(size: int, name: str) -> dict[str, int]:
    by_rank = [found[name][2] for found in of_all(size)]
    return {what: sum(of.get(what, 0) for of in by_rank) for what in by_rank[0]}


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [sized(size) for size in BY_SIZE])
def test_the_bytes_that_are_sent_are_those_of_the_formulas(size):
    nodes, channels, wide = 63, 16, 8
    found, others = sent(size, "max"), size - 1
    forwards = STEPS + 2  # two more for graphs and scores, of which the second needs no statistics
    assert found["knn"] == forwards * 2 * others * B * nodes * channels * wide
    assert found["indices"] == forwards * others * B * nodes * (3 + 4) * 4
    of_switch = others * B * nodes * channels * wide // size
    assert found["switches"] == 2 * of_switch * 2 * (forwards + STEPS)  # of two blocks
    # A block's norms have C, 2 C, C, 4 C and C channels.
    forth = (forwards - 1) * 24 * others * size
    back = STEPS * 2 * others * 2 * wide
    assert found["norms"] == 2 * 9 * channels * (forth + back)
    # Distances from sums over channels: of the first stage, to 20 candidates; of the second, rows.
    found = sent(size, "pyramid")
    products = 2 * others * B * nodes * 20 * wide
    lengths = 2 * 2 * others * B * (nodes + 20) * wide
    features = others * B * 20 * 16 * wide
    assert found["knn"] == forwards * (products + lengths + features)


DIGITS = TrainConfig(
    model="vig_digits", batch_size=11, microbatches=1, steps=2, dtype="float64", opt="sgd", dp=2,
    mixup=0.2,
)  # fmt: skip


def runs(rank, world_size, shards):
    """Train and evaluate as the command does, with mixed images; 11 of them make unequal halves."""
    torch.set_num_threads(1)
    config = replace(DIGITS, shards=shards)
    state = make_rank_state(prepare(config, torch.float64), rank, torch.device("cpu"))
    kept = trace(state, 2)
    scores = evaluate_all(state)
    state.feed.close()
    return kept, scores


@pytest.mark.multiprocess
def test_replicas_of_two_ranks_train_and_score_like_replicas_of_one():
    ours, whole = run_ranks(runs, 4, 2, timeout=GUARD), run_ranks(runs, 2, 1)
    assert ours[0][0] is not None
    for row in differences(ours[0][0], whole[0][0]):
        assert row.within(torch.float64), row
    for _, scores in ours:
        assert scores.test.num_samples == whole[0][1].test.num_samples
        assert scores.test.top1 == whole[0][1].test.top1
        assert scores.test.loss == pytest.approx(whole[0][1].test.loss, rel=1e-9)


def test_what_cannot_be_shared_is_refused():
    rows = [
        ({"shards": 9}, "8 rows and 16 channels; take --shards 8 or fewer"),
        ({"shards": 2, "model": "vig_study"}, "vig_study is none"),
        ({"shards": 2, "compile": True}, "--compile with --shards 2"),
    ]
    check_refusals(rows, lambda options: prepare(replace(DIGITS, **options), torch.float64))
