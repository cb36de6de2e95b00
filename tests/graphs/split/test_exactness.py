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
from tests.world import run_each
from vigpipe.commands.check import trace
from vigpipe.commands.differences import Kinds, differences
from vigpipe.config.options import TrainConfig
from vigpipe.graphs.split import sums
from vigpipe.launch.device import weight_dtype
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
NUM_STEPS = 6
BASE = TrainConfig(
    data="sbm:203,4,9,5",
    layers=3,
    width=10,
    dropout=0.3,
    opt="sgd",
    lr=0.005,
    steps=NUM_STEPS,
    dtype="float64",
    seed=7,
)
CLIPPED, AGAIN, PLAIN = {"clip": 0.5, "ema": 0.5}, {"recompute": "always"}, {"impl": "plain"}
PARTS: dict[str, Any] = {"sampler": "parts", "parts": 7}
# Form, model, features (9, or 90 words), width, norm, dtype, and what else. Any two values of two
# columns meet, but for a model and what else, and for float32 and batch norm, where the gradient of
# a bias is noise.
ROWS: list[tuple[Any, Any, str, int, Any, Any, dict[str, Any]]] = [
    ("mixed", "gcn", "dense", 10, "batch", "float64", CLIPPED),
    ("mixed", "gcn", "words", 10, "none", "float32", AGAIN),
    # Maxima are compared in float64: rounding decides near-ties in float32, by the processor.
    ("mixed", "sage", "words", 10, "batch", "float64", {**PLAIN, "aggregator": "pool"}),
    ("mixed", "sage", "words", 10, "batch", "float64", {**AGAIN, "aggregator": "max"}),
    ("mixed", "sage", "dense", 90, "none", "float32", {}),
    ("mixed", "gat", "dense", 10, "layer", "float64", {**AGAIN, "heads": 2, "aggregator": "v2"}),
    ("mixed", "gat", "words", 10, "none", "float64", {"heads": 1}),
    ("mixed", "gin", "dense", 10, "batch", "float64", AGAIN),
    ("mixed", "gcn2", "dense", 90, "batch", "float64", CLIPPED),
    ("mixed", "gcn2", "dense", 10, "layer", "float64", PLAIN),
    # Sub-graphs; some have fewer nodes than there are ranks.
    ("mixed", "gat", "dense", 10, "batch", "float64", {**PARTS, "microbatches": 2, "heads": 2}),
    ("mixed", "gcn", "dense", 10, "none", "float64", {**PARTS, "partition": "random", "parts": 60}),
    ("mixed", "gcn", "dense", 10, "none", "float64", {"sampler": "saint-node", "sample_nodes": 70}),
    ("halo", "gcn", "dense", 90, "layer", "float64", {}),
    ("halo", "sage", "dense", 10, "layer", "float64", PLAIN),
    ("halo", "sage", "dense", 10, "none", "float64", {**CLIPPED, "aggregator": "max"}),
    ("halo", "sage", "dense", 10, "batch", "float64", {**CLIPPED, "aggregator": "pool"}),
    ("halo", "gat", "dense", 10, "batch", "float64", {**CLIPPED, "heads": 2, "aggregator": "v2"}),
    ("halo", "gat", "words", 90, "layer", "float32", {**PLAIN, "heads": 5}),
    ("halo", "gin", "dense", 90, "none", "float64", PLAIN),
    ("halo", "gin", "words", 10, "layer", "float32", CLIPPED),
    ("halo", "gcn2", "words", 90, "none", "float32", AGAIN),
]


def config_of(split, model, features, width, norm, dtype, more) -> TrainConfig:
    data = words_graph(weighted=more.get("aggregator") not in ("max", "pool"))
    of_features = {} if features == "dense" else {"data": data, "features": "tfidf"}
    options: dict[str, Any] = {"width": width, "norm": norm, "dtype": dtype, **of_features, **more}
    return replace(BASE, model=model, split=split, **options)


# Also with two replicas, which take a part each.
REPLICATED = [
    replace(BASE, model="gat", heads=2, dp=2, **PARTS),
    replace(BASE, model="sage", norm="batch", dp=2, compress="bfloat16", **PARTS),
]


def traced(rank, world_size, config):
    """On every rank: train and evaluate; what the writer has, and the scores."""
    torch.set_num_threads(1)
    # Or columns of so few channels would be summed in one piece.
    sums.LEAST_COLUMNS = 2  # pyrefly: ignore[bad-assignment]
    rank_state = make_rank_state(prepare(config, weight_dtype(config.dtype)), rank, CPU)
    kept = trace(rank_state, NUM_STEPS)
    scores = evaluate_all(rank_state)
    rank_state.feed.close()
    assert (kept is None) == (rank > 0)
    return kept, scores


FEW, MORE = {"mixed": 3, "halo": 2}, {"mixed": 4, "halo": 3}  # ranks
OF_MORE = [0, 4, 10, 14, 17]  # rows of each kind of communication


@cache
def of_shards(split: str, shards: int) -> dict[int, list[tuple[Kinds | None, Any]]]:
    """What all ranks have, by the number of the row."""
    some = OF_MORE if shards == MORE[split] else range(len(ROWS))
    numbers = [number for number in some if ROWS[number][0] == split]
    configs = [replace(config_of(*ROWS[number]), shards=shards) for number in numbers]
    return dict(zip(numbers, run_each(traced, shards, configs), strict=True))


@cache
def of_one(number: int) -> tuple[Any, Any]:
    """What one process has of a row."""
    config = replace(config_of(*ROWS[number]), split="mixed")
    return traced(0, 1, config)


def check_equal(ranks, reference, dtype):
    (ours, scores), (whole, of_whole) = ranks[0], reference
    assert ours is not None
    assert len(ours["loss"]["loss"]) == len(whole["loss"]["loss"]) == NUM_STEPS
    for row in differences(ours, whole):
        assert row.within(dtype), row
    assert scores.test.num_samples == of_whole.test.num_samples
    assert scores.test.loss == pytest.approx(of_whole.test.loss, rel=1e-5)
    assert scores.test.macro_f1 == pytest.approx(of_whole.test.macro_f1, rel=1e-5)
    assert all(of_rank == scores for _, of_rank in ranks)


def check_row(number, shards):
    split, dtype = ROWS[number][0], weight_dtype(ROWS[number][5])
    check_equal(of_shards(split, shards[split])[number], of_one(number), dtype)


def name_of(number: int) -> str:
    return " ".join(map(str, ROWS[number][:6]))


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", range(len(ROWS)), ids=name_of)
def test_ranks_that_share_a_graph_train_like_one(number):
    check_row(number, FEW)


@pytest.mark.multiprocess
@pytest.mark.heavy
@pytest.mark.parametrize("number", OF_MORE, ids=name_of)
def test_so_do_more_ranks(number):
    check_row(number, MORE)


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_replicas_of_several_ranks_train_like_one_process():
    shared = [replace(config, shards=2) for config in REPLICATED]
    of_four, whole = run_each(traced, 4, shared), run_each(traced, 2, REPLICATED)
    for config, ours, (reference, _) in zip(REPLICATED, of_four, whole, strict=True):
        check_equal(ours, reference, weight_dtype(config.dtype))
