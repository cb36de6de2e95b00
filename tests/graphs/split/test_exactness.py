"""Ranks that share a graph train like one process that has it whole.

The nodes, the channels and the classes are not divisible by the number of ranks. SGD, because Adam
divides by the size of a gradient: it makes a step of noise where a bias has a norm after it.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.graphs.test_exactness import words_graph
from tests.world import run_ranks
from vigpipe.commands.check import trace
from vigpipe.commands.differences import Trace, differences
from vigpipe.config.options import TrainConfig
from vigpipe.graphs.split import sums
from vigpipe.launch.device import weight_dtype
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
FEW, MANY = 6, 20  # steps; many for what is not run every time
BASE = TrainConfig(
    data="sbm:203,4,9,5",
    layers=3,
    width=10,
    dropout=0.3,
    opt="sgd",
    lr=0.02,
    steps=MANY,
    dtype="float64",
    seed=7,
)
WORDS = replace(BASE, data=words_graph(), features="tfidf")
SETUPS: dict[str, TrainConfig] = {
    "gcn": replace(BASE, model="gcn"),
    "gcn widens": replace(BASE, model="gcn", width=90, norm="layer"),  # more than its 64 features
    "gcn batch": replace(BASE, model="gcn", norm="batch", clip=0.5, ema=0.5),
    "gcn float32": replace(BASE, model="gcn", norm="layer", dtype="float32"),
    "gcn recompute": replace(BASE, model="gcn", norm="batch", recompute="always"),
    "gcn words": replace(WORDS, model="gcn"),
    "sage": replace(BASE, model="sage", norm="batch"),
    "sage widens": replace(BASE, model="sage", width=90),
    "sage max": replace(BASE, model="sage", aggregator="max", norm="layer"),
    "sage pool": replace(BASE, model="sage", aggregator="pool", dtype="float32"),
    "sage words": replace(WORDS, model="sage", norm="batch"),
    "gat": replace(BASE, model="gat", heads=2, norm="batch"),
    "gat float32": replace(BASE, model="gat", heads=5, lr=0.001, dtype="float32"),
    "gat v2": replace(BASE, model="gat", heads=2, aggregator="v2", norm="layer"),
    "gat words": replace(WORDS, model="gat", heads=1),
    "gat plain": replace(BASE, model="gat", heads=2, impl="plain"),
    "gin": replace(BASE, model="gin", norm="batch"),
    "gin widens": replace(BASE, model="gin", width=90, norm="layer", lr=0.002),
    "gcn2": replace(BASE, model="gcn2", norm="layer"),
    "gcn2 words": replace(WORDS, model="gcn2", dtype="float32"),
    "parts": replace(BASE, model="gat", sampler="parts", parts=7, microbatches=2, heads=2, lr=1e-3),
    "small parts": replace(BASE, model="gcn", sampler="parts", partition="random", parts=60),
    "saint": replace(BASE, model="gcn", sampler="saint-node", sample_nodes=70, coverage=5),
}
WHOLE = {name: config for name, config in SETUPS.items() if config.sampler is None}
# Also with two replicas, which take a part each.
REPLICATED: dict[str, TrainConfig] = {
    "parts": replace(SETUPS["parts"], microbatches=1, dp=2),
    "sage compressed": replace(
        SETUPS["sage"],
        sampler="parts",
        parts=7,
        dp=2,
        compress="bfloat16",
    ),
}


def traces(rank, world_size, configs, num_steps=MANY):
    """On every rank: train with each configuration, and evaluate; what the writer has."""
    torch.set_num_threads(1)
    sums.LEAST_COLUMNS = 2  # or columns of so few channels would be summed in one piece
    found = []
    for config in configs:
        rank_state = make_rank_state(prepare(config, weight_dtype(config.dtype)), rank, CPU)
        kept = trace(rank_state, num_steps)
        scores = evaluate_all(rank_state)
        rank_state.feed.close()
        assert (kept is None) == (rank > 0)
        found.append((kept, scores))
    return found


@cache
def of_shards(split: Any, shards: int, num_steps: int) -> dict[str, list[tuple[Trace | None, Any]]]:
    """What all ranks have, by setup."""
    setups = SETUPS if split == "mixed" else WHOLE
    configs = [replace(config, split=split, shards=shards) for config in setups.values()]
    if shards == 1:
        ranks = [traces(0, 1, configs, num_steps)]
    else:
        ranks = run_ranks(traces, shards, configs, num_steps, timeout=240)
    return dict(zip(setups, map(list, zip(*ranks, strict=True)), strict=True))


def check_equal(ranks, reference, dtype, num_steps=MANY):
    (ours, scores), (whole, of_whole) = ranks[0], reference
    assert ours is not None
    assert len(ours.losses) == len(whole.losses) == num_steps
    for row in differences(ours, whole):
        assert row.within(dtype), row
    assert scores.test.num_samples == of_whole.test.num_samples
    assert scores.test.loss == pytest.approx(of_whole.test.loss, rel=1e-5)
    assert scores.test.macro_f1 == pytest.approx(of_whole.test.macro_f1, rel=1e-5)
    assert all(of_rank == scores for _, of_rank in ranks)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize(
    ("shards", "num_steps"),
    [(3, FEW), *(pytest.param(m, MANY, marks=pytest.mark.heavy) for m in (2, 4))],
)
def test_ranks_with_rows_and_columns_train_like_one(shards, num_steps, name):
    ours, (whole, *_) = (of_shards("mixed", m, num_steps)[name] for m in (shards, 1))
    check_equal(ours, whole, weight_dtype(SETUPS[name].dtype), num_steps)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("shards", "num_steps"),
    [(2, FEW), *(pytest.param(m, MANY, marks=pytest.mark.heavy) for m in (3, 4))],
)
def test_ranks_with_parts_and_halos_train_like_one(shards, num_steps, name):
    ours, whole = of_shards("halo", shards, num_steps)[name], of_shards("mixed", 1, num_steps)[name]
    check_equal(ours, whole[0], weight_dtype(SETUPS[name].dtype), num_steps)


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_replicas_of_several_ranks_train_like_one_process():
    configs = list(REPLICATED.values())
    shared = run_ranks(traces, 4, [replace(config, shards=2) for config in configs], timeout=240)
    whole = run_ranks(traces, 2, configs, timeout=240)
    for i, config in enumerate(configs):
        check_equal([found[i] for found in shared], whole[0][i], weight_dtype(config.dtype))
