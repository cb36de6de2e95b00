"""The exactness contract on one large graph: every layout trains like the unsplit model.

A step takes four of eleven parts, so an epoch's last step finds three; the other samplers draw as
many sub-graphs. The unsplit model is compared with a loop of torch over torch-geometric's layers.
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
from tests.world import run_each
from vigpipe.commands.check import trace
from vigpipe.commands.differences import Kinds, differences
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
_FOLDER = TemporaryDirectory()  # until this process ends


def words_graph(*, weighted: bool = True) -> str:
    """Write a graph whose features are 6 of 90 words for every node, and return its path."""
    path, draws = Path(_FOLDER.name) / f"words-{weighted}.npz", np.random.default_rng(0)
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
    if weighted:
        arrays["edge_weight"] = draws.uniform(0.2, 3, 1500)
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
NO_PARTS = {"partition": None, "parts": None}
DATA: dict[str, dict[str, Any]] = {
    "dense": {},
    "words": {"data": SPARSE.data, "features": "tfidf"},
    "folder": {"data": prepared_folder(BASE.data, "raw"), **NO_PARTS},
    "words folder": {"data": prepared_folder(SPARSE.data, "tfidf"), **NO_PARTS},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "parts": {},
    "joined": {"merge": 2, "parts": 23},
    "saint-node": {**NO_PARTS, "sample_nodes": 120, "coverage": 5},
    "saint-edge": {**NO_PARTS, "sample_edges": 60, "coverage": 5},
    "saint-walk": {**NO_PARTS, "roots": 40, "walk_length": 2, "coverage": 5},
    "fastgcn": {**NO_PARTS, "batch_nodes": 60, "layer_nodes": 40},
    "neighbour": {**NO_PARTS, "batch_nodes": 60, "fanout": "4,3,2,2"},
}
# Layout, model, sampler, features, dtype, norm, and what else. Any two values of two columns meet,
# the three kinds of saint counting as one. D * M = 4, so all layouts see the same sub-graphs.
ROWS: list[tuple[tuple[int, int], Any, str, str, Any, Any, dict[str, Any]]] = [
    ((2, 1), "gcn", "parts", "words folder", "float64", "batch", {}),
    ((2, 1), "gcn", "neighbour", "folder", "float32", "none", {"ema": 0.5, "fanout": "3"}),
    ((2, 1), "sage", "fastgcn", "words", "float64", "none", {}),
    ((2, 1), "gat", "saint-walk", "dense", "float64", "none", {"clip": 0.5}),
    ((2, 1), "gin", "joined", "words", "float64", "layer", {}),
    ((2, 1), "gcn2", "parts", "words", "float32", "batch", {}),
    ((2, 1), "gcn2", "neighbour", "folder", "float64", "none", {}),
    ((4, 1), "gcn", "joined", "words", "float64", "batch", {}),
    ((4, 1), "sage", "parts", "words folder", "float64", "layer", {"clip": 0.5}),
    ((4, 1), "sage", "neighbour", "dense", "float64", "batch", {"aggregator": "pool"}),
    ((4, 1), "gat", "fastgcn", "words folder", "float64", "none", {}),
    ((4, 1), "gin", "saint-edge", "folder", "float64", "batch", {}),
    ((4, 1), "gcn2", "joined", "dense", "float32", "layer", {"ema": 0.5}),
    ((1, 2), "gcn", "saint-walk", "dense", "float64", "batch", {}),
    ((1, 2), "sage", "joined", "folder", "float64", "none", {"clip": 0.5, "aggregator": "pool"}),
    ((1, 2), "gat", "parts", "folder", "float64", "layer", {"ema": 0.5, "aggregator": "v2"}),
    ((1, 2), "gat", "neighbour", "words", "float32", "layer", {}),
    ((1, 2), "gin", "fastgcn", "dense", "float64", "batch", {"ema": 0.5}),
    ((1, 2), "gcn2", "saint-node", "words folder", "float64", "layer", {"ema": 0.5}),
    ((2, 2), "gcn", "fastgcn", "words", "float64", "layer", {"clip": 0.5}),
    ((2, 2), "sage", "saint-node", "words", "float32", "batch", {"ema": 0.5}),
    ((2, 2), "gat", "joined", "words folder", "float64", "batch", {"aggregator": "v2"}),
    ((2, 2), "gin", "parts", "dense", "float64", "none", {}),
    ((2, 2), "gin", "neighbour", "words folder", "float32", "batch", {"clip": 0.5}),
    ((2, 2), "gcn2", "fastgcn", "folder", "float32", "batch", {"clip": 0.5}),
]


def config_of(layout, model, sampler, data, dtype, norm, more) -> TrainConfig:
    of_sampler = {"sampler": "parts" if sampler == "joined" else sampler, **SAMPLERS[sampler]}
    stages, dp = layout
    options: dict[str, Any] = {**of_sampler, **DATA[data], **more, "stages": stages, "dp": dp}
    return replace(BASE, model=model, dtype=dtype, norm=norm, microbatches=4 // dp, **options)


def of_rank(rank, world_size, config) -> tuple[Kinds, Any] | None:
    """On every rank: train and evaluate; what the writer has."""
    torch.set_num_threads(1)
    rank_state = make_rank_state(prepare(config, weight_dtype(config.dtype)), rank, CPU)
    kept = trace(rank_state, NUM_STEPS)
    scores = evaluate_all(rank_state)
    rank_state.feed.close()
    return None if kept is None else (kept, scores)


@cache
def of_layout(layout: tuple[int, int]) -> list[tuple[Kinds, Any]]:
    """What the writer has, by the row of this layout."""
    configs = [config_of(*row) for row in ROWS if row[0] == layout]
    by_config = run_each(of_rank, layout[0] * layout[1], configs)
    kept = [[t for t in by_rank if t is not None] for by_rank in by_config]
    assert [len(found) for found in kept] == [1] * len(configs)
    return [found for (found,) in kept]


@pytest.mark.multiprocess
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(map(str, row[:6])))
def test_every_layout_equals_the_unsplit_model(row):
    layout, dtype = row[0], weight_dtype(row[4])
    place = [other for other in ROWS if other[0] == layout].index(row)
    ours, scores = of_layout(layout)[place]
    alone = of_rank(0, 1, config_of((1, 1), *row[1:]))
    assert alone is not None
    reference, its_scores = alone
    is_alone = layout[1] == 1
    for of_rows in differences(ours, reference):
        assert of_rows.identical if is_alone else of_rows.within(dtype), of_rows
    assert {len(kinds["loss"]["loss"]) for kinds in (ours, reference)} == {NUM_STEPS}
    if is_alone:
        assert scores == its_scores
    else:
        assert scores.test.loss == pytest.approx(its_scores.test.loss, rel=1e-5)
        assert scores.test.num_samples == its_scores.test.num_samples


@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_sparse_features_give_what_dense_ones_give(model, monkeypatch):
    found: list[Any] = []
    for most_stored, num_in_rows in ((features._MOST_STORED, 0), (0.0, 90)):
        monkeypatch.setattr(features, "_MOST_STORED", most_stored)
        run = prepare(replace(SPARSE, model=model), torch.float64)
        assert run.job.row_shape == (num_in_rows,)
        found.append(trace(make_rank_state(run, 0, CPU), NUM_STEPS))
    assert all(row.within(torch.float64) for row in differences(*found))


@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_the_unsplit_model_is_a_loop_over_torch_geometric(model):
    config = replace(BASE, model=model, dropout=0.0, heads=2 if model == "gat" else None)
    run = prepare(config, torch.float64)
    ours = trace(make_rank_state(run, 0, CPU), NUM_STEPS)
    assert ours is not None
    losses, weights = by_hand(run)
    assert ours["loss"]["loss"].tolist() == pytest.approx(losses, rel=1e-10)
    for name, weight in weights.items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-9, atol=1e-10)


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


WHOLE: dict[str, Any] = {"sampler": "full", **NO_PARTS, "microbatches": 1}


def traced(num_steps=NUM_STEPS, **options) -> Kinds:
    run = prepare(replace(BASE, **options), torch.float64)
    found = trace(make_rank_state(run, 0, CPU), num_steps)
    assert found is not None
    return found


def test_one_part_is_the_whole_graph():
    first = traced(model="gcn", **WHOLE)
    for options in ({"parts": 1}, {"parts": 6, "merge": 6}):
        other = traced(model="gcn", microbatches=1, **options)
        assert all(row.identical for row in differences(first, other))


def test_bfloat16_learns_too():
    config = replace(BASE, model="sage", data="sbm:500,4", layers=2, dtype="bfloat16", lr=0.05)
    rank_state = make_rank_state(prepare(replace(config, **WHOLE), torch.float32), 0, CPU)
    assert trace(rank_state, 15) is not None
    scores = evaluate_all(rank_state)
    assert scores.test is not None
    assert scores.test.numbers()["accuracy"] > 0.9
