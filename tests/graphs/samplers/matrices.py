"""Dense matrices of sums over edges, and a small graph to sample."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.graphs.partitions.small_graphs import blocks_graph
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.graphs.graph import TEST, TRAIN
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.model.gnn.create import create_graph_model

NUM_NODES = 60
# Edges go both ways, with two weights; there are some self-loops. Half of the nodes are trained on.
_PLAIN, _ = blocks_graph(NUM_NODES, 3, 5, 2, seed=4)
GRAPH = replace(
    _PLAIN,
    split=np.where(np.arange(NUM_NODES) % 2, TRAIN, TEST).astype(np.int8),
    edge_weights=np.random.default_rng(2).uniform(0.2, 3, _PLAIN.num_edges).astype(np.float32),
)
PLAIN = replace(GRAPH, edge_weights=None)
X = np.random.default_rng(1).standard_normal((NUM_NODES, 6))
MODELS = [*GRAPH_MODELS, "sage max"]


def matrix(adjacency: Any, kind: Any) -> np.ndarray:
    """The matrix that a layer multiplies features by: (targets, sources)."""
    adjacency = adjacency.with_loops() if kind == "gcn" else adjacency
    found = np.zeros((adjacency.num_targets, adjacency.num_sources))
    weights = adjacency.weights(kind, torch.float64).numpy()
    found[adjacency.targets.numpy(), adjacency.indices.numpy()] = weights
    return found


def logits(name: str, nodes: np.ndarray, adjacency: Any = None) -> torch.Tensor:
    """What a model of two layers, always the same one, makes of some nodes."""
    model, *aggregator = name.split()
    torch.manual_seed(0)
    options: dict[str, Any] = {"aggregator": aggregator[0] if aggregator else None}
    sizes = {"in_channels": X.shape[1], "num_classes": 3, "num_layers": 2, "width": 8}
    made = create_graph_model(model, **sizes, **options).double().eval()  # pyrefly: ignore[bad-argument-type]
    adjacency = all_edges(GRAPH) if adjacency is None else adjacency
    return made(torch.from_numpy(X[nodes]), None, adjacency)
