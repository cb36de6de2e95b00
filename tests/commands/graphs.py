"""Graphs whose classes are named, and weights of models for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.config.choices import GnnModel
from vigpipe.config.options import TrainConfig
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.run.facts import prepare

NUM_NODES, CLASSES = 40, ("ant", "bee", "cow")
OPTIONS: dict[GnnModel, dict[str, Any]] = {
    "gcn": {"layers": 3, "width": 8, "norm": "layer", "features": "row"},
    "sage": {"aggregator": "max", "symmetric": False},
    "gat": {"aggregator": "v2", "heads": 2, "width": 8},
    "gin": {"norm": "batch"},
    "gcn2": {"layers": 4, "width": 8},
}


def write_graph(path="g.npz", *, several=False, num_features=5, **others):
    """A graph file whose classes are named, with nodes of all splits."""
    random = np.random.default_rng(0)
    y = np.arange(NUM_NODES) % len(CLASSES)
    if several:
        y = random.integers(0, 2, (NUM_NODES, len(CLASSES)))
    arrays: dict[str, Any] = {
        "edge_src": random.integers(0, NUM_NODES, 120),
        "edge_dst": random.integers(0, NUM_NODES, 120),
        "x": random.random((NUM_NODES, num_features)),
        "y": y,
        "split": np.repeat([0, 1, 2, -1], NUM_NODES // 4),
        "classes": np.array(CLASSES),
        **others,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def write_weights(model: GnnModel = "sage", **options: Any) -> GraphJob:
    """Weights of a model for g.npz, as a run of training writes them."""
    options = {**OPTIONS[model], **options}
    run = prepare(TrainConfig(model=model, data="g.npz", seed=1, **options), torch.float32)
    save_weights(Path("w.safetensors"), run.build().state_dict(), run.weights_metadata())
    assert isinstance(run.job, GraphJob)
    return run.job


def logits_of(job: GraphJob) -> torch.Tensor:
    torch.manual_seed(job.config.seed)
    model = job.make_model().eval()
    assert isinstance(job.graph.features, np.ndarray)
    with torch.no_grad():
        return model(torch.from_numpy(job.graph.features), None, all_edges(job.graph))
