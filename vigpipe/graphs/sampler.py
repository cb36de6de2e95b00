"""Which sub-graphs of one graph an epoch consists of; a micro-batch is one of them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.partitions.partition import Partition
from vigpipe.job.order import epoch_order
from vigpipe.ops.adjacency import Adjacency


class SubGraph(NamedTuple):
    """Some nodes of a graph, and the edges between them.

    Attributes:
        nodes: (b,) int64, ascending.
        adjacency: the edges, between places in `nodes`.
    """

    nodes: np.ndarray
    adjacency: Adjacency


class Sampler(Protocol):
    """Draws the sub-graphs of an epoch; what it draws depends on seed, epoch and number only.

    Attributes:
        num_per_epoch: number of sub-graphs of an epoch.
        most_nodes: a bound for the nodes of a sub-graph.
    """

    num_per_epoch: int
    most_nodes: int

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Draw a sub-graph of an epoch, which is counted from 1."""
        ...

    def count(self, epoch: int, number: int) -> tuple[int, int]:
        """Return the number of nodes of a sub-graph, and how many of them are trained on."""
        ...


class WholeGraph:
    """The graph itself, once an epoch.

    Args:
        graph: the graph.
    """

    num_per_epoch = 1

    def __init__(self, graph: Graph) -> None:
        self.most_nodes = graph.num_nodes
        self._num_train = len(graph.nodes_of(TRAIN))
        self._whole = whole(graph)

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Return the graph."""
        return self._whole

    def count(self, epoch: int, number: int) -> tuple[int, int]:
        """Return the number of all nodes, and of the training nodes."""
        return self.most_nodes, self._num_train


class Parts:
    """The parts of a partition, in a new order each epoch, several of them joined in a sub-graph.

    With joined parts, the edges between them count again (Cluster-GCN, arXiv:1905.07953).

    Args:
        graph: the graph.
        partition: of its nodes.
        num_joined: q, how many parts make a sub-graph; the last one of an epoch may have fewer.
        seed: of the order.
    """

    def __init__(self, graph: Graph, partition: Partition, num_joined: int, seed: int) -> None:
        self._partition, self._num_joined, self._seed = partition, num_joined, seed
        self._induced = Induced(graph)
        num_parts = partition.num_parts
        self.num_per_epoch = -(-num_parts // num_joined)
        self.most_nodes = int(np.sort(partition.sizes)[-num_joined:].sum())
        is_train = graph.split == TRAIN
        self._num_train = np.bincount(partition.parts[is_train], minlength=num_parts)
        # Single parts come again in every epoch, so their edges are kept: at most those of the
        # graph. Joined ones hardly ever do.
        self._take = lru_cache(num_parts if num_joined == 1 else 1)(self._sub_graph)
        self._order = lru_cache(1)(lambda epoch: epoch_order(seed, epoch, num_parts))

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Return the sub-graph on the parts whose turn it is."""
        return self._take(tuple(sorted(self._parts(epoch, number).tolist())))

    def count(self, epoch: int, number: int) -> tuple[int, int]:
        """Return the number of nodes and of training nodes of these parts."""
        parts = self._parts(epoch, number)
        return int(self._partition.sizes[parts].sum()), int(self._num_train[parts].sum())

    def _parts(self, epoch: int, number: int) -> np.ndarray:
        first = number * self._num_joined
        return self._order(epoch)[first : first + self._num_joined]

    def _sub_graph(self, parts: Sequence[int]) -> SubGraph:
        nodes = np.concatenate([self._partition.nodes_of(part) for part in parts])
        nodes.sort()
        indptr, indices = self._induced.on(nodes)
        return SubGraph(nodes, Adjacency(torch.from_numpy(indptr), torch.from_numpy(indices)))


def whole(graph: Graph) -> SubGraph:
    """Return all nodes with all edges."""
    edges = torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices)
    return SubGraph(np.arange(graph.num_nodes), Adjacency(*edges))
