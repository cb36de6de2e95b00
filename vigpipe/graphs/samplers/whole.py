"""Take the graph itself."""

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.samplers.sampler import Sampler, SubGraph
from vigpipe.graphs.samplers.surroundings import CutGraph
from vigpipe.ops.adjacency import Adjacency


class WholeGraph(Sampler):
    """The graph itself, once an epoch."""

    num_sub_graphs = (1,)
    takes_all = True

    def __init__(self, graph: Graph) -> None:
        self.most_nodes = self.most_targets = graph.num_nodes
        self._num_train = len(graph.nodes_of(TRAIN))
        self._whole = whole(graph)

    def draw(self, epoch: int, number: int) -> SubGraph:
        return self._whole

    def num_nodes(self, epoch: int, number: int) -> int:
        return self.most_nodes

    def num_training_nodes(self, epoch: int, number: int) -> int:
        return self._num_train

    def num_edges(self, epoch: int, number: int) -> int:
        return self._whole.adjacency.num_edges

    def as_table(self) -> dict[str, object]:
        return {"kept_edge_fraction": 1.0}


def whole(graph: Graph) -> SubGraph:
    """Return all nodes with all edges."""
    return SubGraph(np.arange(graph.num_nodes), all_edges(graph))


def all_edges(graph: Graph) -> Adjacency:
    """Return all edges, between all nodes."""
    if isinstance(graph, CutGraph):
        return graph.excerpt
    rows = torch.from_numpy(graph.indptr), torch.from_numpy(graph.sources())
    return Adjacency(*rows, edge_weights=weight_tensor(graph, slice(None)))


def weight_tensor(graph: Graph, edges: np.ndarray | slice) -> torch.Tensor | None:
    """Return the weights of edges, (e,) float32, by their numbers; None if all are 1."""
    weights = graph.weights_of(edges)
    return None if weights is None else torch.from_numpy(weights)
