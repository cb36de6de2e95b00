"""The exactness contract on one large graph: every layout trains like the unsplit model.

Five hundred nodes in eleven parts; a step takes four of them, so the last step of an epoch finds
three. The other samplers draw so that an epoch has one such step and one of fewer sub-graphs. The
unsplit model is compared with a loop of plain torch over torch-geometric's layers.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.model.gnn.graphs import PygModel
from tests.world import run_ranks
from vigpipe.commands.check import trace
from vigpipe.commands.differences import Trace, differences
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.config.options import TrainConfig
from vigpipe.graphs import features
from vigpipe.graphs.graph import TEST, TRAIN
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.prepared.write import write_folder
from vigpipe.graphs.sources import open_graph
from vigpipe.job.order import epoch_order
from vigpipe.launch.device import weight_dtype
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
NUM_STEPS = 3
BASE = TrainConfig(
    data="sbm:500,4,12,6",
    layers=4,
    width=8,
    dropout=0.3,
    sampler="parts",
    partition="random",
    parts=11,
    microbatches=4,
    steps=NUM_STEPS,
    dtype="float64",
    seed=7,
)
SAMPLED: list[tuple[Any, Any, dict[str, Any]]] = [
    ("sage", "saint-node", {"sample_nodes": 120, "coverage": 5, "norm": "batch"}),
    ("gin", "saint-edge", {"sample_edges": 60, "coverage": 5, "clip": 0.5}),
    ("gcn", "saint-walk", {"roots": 40, "walk_length": 2, "coverage": 5, "dtype": "float32"}),
    ("gat", "saint-walk", {"roots": 40, "walk_length": 2, "coverage": 5}),
    ("gcn2", "fastgcn", {"batch_nodes": 60, "layer_nodes": 40}),
    ("sage", "neighbour", {"batch_nodes": 60, "fanout": "4,3,2,2", "norm": "batch"}),
    ("gat", "neighbour", {"batch_nodes": 60, "fanout": "3", "ema": 0.5}),
]

_FOLDER = TemporaryDirectory()  # until this process ends


def words_graph() -> str:
    """Write a graph whose features are 6 of 90 words for every node, and return its path."""
    path, draws = Path(_FOLDER.name) / "words.npz", np.random.default_rng(0)
    words = np.sort([draws.choice(90, 6, replace=False) for _ in range(500)])
    arrays = {
        "edge_src": draws.integers(500, size=1500),
        "edge_dst": draws.integers(500, size=1500),
        "x_indptr": np.arange(501) * 6,
        "x_indices": words.ravel(),
        "num_features": np.array(90),
        "y": draws.integers(4, size=500),
        "split": draws.choice([TRAIN, TEST], p=[0.8, 0.2], size=500),
    }
    np.savez(path, **arrays)
    return str(path)


def prepared_folder(data: str, scaling: Any) -> str:
    """Write a graph as a folder of 7 random parts, and return its path."""
    folder = Path(_FOLDER.name) / f"prepared-{scaling}"
    options = {"data_dir": Path(), "download": False, "symmetric": True, "seed": 7}
    graph = open_graph(data, features=scaling, **options)
    partition = make_partition(graph, "random", 7, seed=0)
    write_folder(folder, graph, partition, scaling=scaling, symmetric=True, seed=7)
    return str(folder)


SPARSE = replace(BASE, data=words_graph(), features="tfidf")
DENSE_FOLDER = prepared_folder(BASE.data, "raw")
PREPARED = replace(BASE, partition=None, parts=None)
SETUPS: dict[str, TrainConfig] = {
    **{model: replace(BASE, model=model) for model in GRAPH_MODELS},
    "gat v2": replace(BASE, model="gat", aggregator="v2", norm="layer"),
    "sage pool": replace(BASE, model="sage", aggregator="pool", norm="batch", clip=0.5),
    "gin joined": replace(BASE, model="gin", norm="batch", merge=2, parts=23, ema=0.5),
    "gcn float32": replace(BASE, model="gcn", dtype="float32", norm="batch"),
    **{
        f"{model} {sampler}": replace(
            BASE, model=model, sampler=sampler, partition=None, parts=None, **options
        )
        for model, sampler, options in SAMPLED
    },
    "sage words": replace(SPARSE, model="sage"),
    "gat words": replace(SPARSE, model="gat", dtype="float32"),
    "gcn prepared": replace(PREPARED, model="gcn", data=DENSE_FOLDER),
    "gin prepared": replace(PREPARED, model="gin", data=DENSE_FOLDER, norm="batch"),
    "sage prepared words": replace(
        PREPARED,
        model="sage",
        data=prepared_folder(SPARSE.data, "tfidf"),
        sampler="neighbour",
        batch_nodes=60,
        fanout="3",
    ),
}
# D * M = 4 throughout, so that all layouts see the same sub-graphs.
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


def traces(rank, world_size, configs):
    """On every rank: train with each configuration, and evaluate; what the writer has."""
    torch.set_num_threads(1)
    found = []
    for config in configs:
        rank_state = make_rank_state(prepare(config, weight_dtype(config.dtype)), rank, CPU)
        kept = trace(rank_state, NUM_STEPS)
        scores = evaluate_all(rank_state)
        found.append(None if kept is None else (kept, scores))
    return found


@cache
def of_layout(stages: int, dp: int) -> dict[str, tuple[Trace, Any]]:
    configs = [
        replace(config, stages=stages, dp=dp, microbatches=4 // dp) for config in SETUPS.values()
    ]
    world_size = stages * dp
    if world_size == 1:
        ranks = [traces(0, 1, configs)]
    else:
        ranks = run_ranks(traces, world_size, configs, timeout=240)
    kept = [[t for t in of_config if t is not None] for of_config in zip(*ranks, strict=True)]
    assert [len(found) for found in kept] == [1] * len(configs)
    return dict(zip(SETUPS, (found[0] for found in kept), strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize(("stages", "dp"), LAYOUTS[1:])
def test_every_layout_equals_the_unsplit_model(stages, dp, name):
    (ours, scores), (reference, its_scores) = of_layout(stages, dp)[name], of_layout(1, 1)[name]
    for row in differences(ours, reference):
        assert row.identical if dp == 1 else row.within(weight_dtype(SETUPS[name].dtype)), row
    assert {len(ours.losses), len(reference.losses)} == {NUM_STEPS}
    if dp == 1:
        assert scores == its_scores
    else:
        assert scores.test.loss == pytest.approx(its_scores.test.loss, rel=1e-5)
        assert scores.test.num_samples == its_scores.test.num_samples


@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_sparse_features_give_what_dense_ones_give(model, monkeypatch):
    run = prepare(replace(SPARSE, model=model), torch.float64)
    assert run.job.row_shape == (0,)
    sparse = trace(make_rank_state(run, 0, CPU), NUM_STEPS)
    monkeypatch.setattr(features, "_MOST_STORED", 0.0)
    run = prepare(replace(SPARSE, model=model), torch.float64)
    assert run.job.row_shape == (90,)
    dense = trace(make_rank_state(run, 0, CPU), NUM_STEPS)
    assert sparse is not None
    assert dense is not None
    assert all(row.within(torch.float64) for row in differences(sparse, dense))


@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_the_unsplit_model_is_a_loop_over_torch_geometric(model):
    config = replace(SETUPS[model], dropout=0.0, heads=2 if model == "gat" else None)
    run = prepare(config, torch.float64)
    ours = trace(make_rank_state(run, 0, CPU), NUM_STEPS)
    assert ours is not None
    losses, weights = by_hand(run)
    assert ours.losses == pytest.approx(losses, rel=1e-10)
    for name, weight in weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-9, atol=1e-10)


def part_by_hand(graph, parts, part) -> tuple[torch.Tensor, ...]:
    """Features and edges of a part; which of its nodes are trained on, and the labels of these."""
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    nodes = np.flatnonzero(parts == part)
    local = np.full(graph.num_nodes, -1)
    local[nodes] = np.arange(len(nodes))
    is_in = (parts[targets] == part) & (parts[graph.indices] == part)
    edges = np.stack((local[graph.indices[is_in]], local[targets[is_in]]))
    train = torch.from_numpy(graph.split[nodes] == TRAIN)
    labels = torch.from_numpy(graph.labels[nodes])[train]
    x = torch.from_numpy(graph.features[nodes]).double()
    return x, torch.from_numpy(edges), train, labels


def by_hand(run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the parts, four a step, with torch-geometric's layers and torch's Adam."""
    config, job = run.config, run.job
    assert isinstance(job, GraphJob)
    assert job.partition is not None
    graph, parts = job.graph, job.partition.parts
    sizes = {"in_channels": graph.num_features, "num_classes": graph.num_classes}
    options = {"num_layers": config.layers, "width": config.width, "heads": config.heads or 1}
    model = PygModel(config.model, **sizes, **options).double()
    model.load_state_dict(run.build().state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    order, losses = epoch_order(config.seed, 1, config.parts), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        chosen = order[4 * step : 4 * step + 4]
        num_train = sum(((parts == part) & (graph.split == TRAIN)).sum() for part in chosen)
        total = 0.0
        for part in chosen:
            x, edges, train, labels = part_by_hand(graph, parts, part)
            loss = F.cross_entropy(model(x, edges)[train], labels, reduction="sum") / num_train
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def test_one_part_is_the_whole_graph():
    whole = prepare(replace(BASE, model="gcn", sampler="full", partition=None, parts=None,
                            microbatches=1), torch.float64)  # fmt: skip
    one = prepare(replace(BASE, model="gcn", parts=1, microbatches=1), torch.float64)
    joined = prepare(replace(BASE, model="gcn", parts=6, merge=6, microbatches=1), torch.float64)
    first, *others = (trace(make_rank_state(run, 0, CPU), 3) for run in (whole, one, joined))
    assert first is not None
    for other in others:
        assert other is not None
        assert all(row.identical for row in differences(first, other))


def test_the_seed_changes_weights_order_and_masks():
    traces_of = [
        trace(make_rank_state(prepare(replace(BASE, model="sage", **options), torch.float64), 0,
                              CPU), 2)
        for options in ({}, {"seed": 8}, {"dropout": 0.0})
    ]  # fmt: skip
    losses = [t.losses for t in traces_of if t is not None]
    assert len({tuple(of_run) for of_run in losses}) == 3
    assert losses[0][0] != losses[2][0]  # the same weights, another mask


def test_bfloat16_learns_too():
    whole = {"sampler": "full", "partition": None, "parts": None, "microbatches": 1}
    config = replace(BASE, model="sage", data="sbm:500,4", layers=2, dtype="bfloat16", lr=0.05)
    config = replace(config, **whole)
    run = prepare(config, torch.float32)
    rank_state = make_rank_state(run, 0, CPU)
    assert trace(rank_state, 15) is not None
    scores = evaluate_all(rank_state)
    assert scores.test is not None
    assert scores.test.numbers()["accuracy"] > 0.9
