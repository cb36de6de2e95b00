"""Take the graph itself."""

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.samplers.sampler import SubGraph
from vigpipe.ops.adjacency import Adjacency


class WholeGraph:
    """The graph itself, once an epoch.

    Args:
        graph: the graph.
    """

    shares: tuple[int, ...] = (1,)
    takes_all = True

    def __init__(self, graph: Graph) -> None:
        self.most_nodes = self.most_targets = graph.num_nodes
        self._num_train = len(graph.nodes_of(TRAIN))
        self._whole = whole(graph)

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Return the graph."""
        return self._whole

    def most_rows(self, layer: int) -> int:
        """Return the same bound for all layers."""
        return self.most_nodes

    def num_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes of the graph."""
        return self.most_nodes

    def about_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes, which takes no time."""
        return self.num_nodes(epoch, number)

    def num_training_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes of the graph that are trained on."""
        return self._num_train

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the edges of the graph."""
        return self._whole.adjacency.num_edges

    def describe(self) -> str:
        """Say nothing."""
        return ""

    def as_table(self) -> dict[str, object]:
        """Return that all edges are kept."""
        return {"kept_edge_fraction": 1.0}


def whole(graph: Graph) -> SubGraph:
    """Return all nodes with all edges."""
    return SubGraph(np.arange(graph.num_nodes), all_edges(graph))


def all_edges(graph: Graph) -> Adjacency:
    """Return all edges, between all nodes."""
    return Adjacency(torch.from_numpy(graph.indptr), torch.from_numpy(graph.sources()))
