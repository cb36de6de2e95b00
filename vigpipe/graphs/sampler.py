"""Which sub-graphs of one graph an epoch consists of; a micro-batch is one of them."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.partitions.partition import Partition, edges_between
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


class Counts(NamedTuple):
    """How large a sub-graph is.

    Attributes:
        nodes: all of its nodes.
        training_nodes: those with a label that is trained on.
    """

    nodes: int
    training_nodes: int


class Sampler(Protocol):
    """Draws the sub-graphs of an epoch; what it draws depends on seed, epoch and number only.

    Attributes:
        shares: number of sub-graphs of an epoch, all of them in one share; or one share for each
            replica, which takes no others. The sub-graphs are numbered one share after the other.
        most_nodes: a bound for the nodes of a sub-graph.
    """

    shares: tuple[int, ...]
    most_nodes: int

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Draw a sub-graph of an epoch, which is counted from 1."""
        ...

    def count(self, epoch: int, number: int) -> Counts:
        """Count the nodes of a sub-graph."""
        ...

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the directed edges of a sub-graph, also of those that this rank does not draw."""
        ...


class WholeGraph:
    """The graph itself, once an epoch.

    Args:
        graph: the graph.
    """

    shares: tuple[int, ...] = (1,)

    def __init__(self, graph: Graph) -> None:
        self.most_nodes = graph.num_nodes
        self._counts = Counts(graph.num_nodes, len(graph.nodes_of(TRAIN)))
        self._whole = whole(graph)

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Return the graph."""
        return self._whole

    def count(self, epoch: int, number: int) -> Counts:
        """Count the nodes of the graph."""
        return self._counts

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the edges of the graph."""
        return self._whole.adjacency.num_edges


class Parts:
    """The parts of a partition, in a new order each epoch, several of them joined in a sub-graph.

    With joined parts, the edges between them count again (Cluster-GCN, arXiv:1905.07953).

    Args:
        graph: the graph.
        generations: the parts of every epoch.
        num_joined: q, how many parts make a sub-graph; the last one of a share may have fewer.
        seed: of the order.
        num_shares: D if each of D replicas has parts of its own: replica r has the parts r, r + D,
            r + 2 D, and so on.
    """

    def __init__(
        self,
        graph: Graph,
        generations: Generations,
        num_joined: int,
        seed: int,
        num_shares: int = 1,
    ) -> None:
        self.generations, self._num_joined, self._seed = generations, num_joined, seed
        self._is_train = graph.split == TRAIN
        self._induced = Induced(graph)
        sizes = [generations.most_nodes[share::num_shares] for share in range(num_shares)]
        self.shares = tuple(-(-len(of_share) // num_joined) for of_share in sizes)
        self.most_nodes = max(int(np.sort(of_share)[-num_joined:].sum()) for of_share in sizes)
        self._in_turn = lru_cache(1)(self._groups)
        self._num_train = lru_cache(2)(self._count_training_nodes)
        self._edges = lru_cache(2)(partial(edges_between, graph))
        # Single parts come again in every epoch, so their edges are kept: at most those of the
        # graph. Joined ones hardly ever do.
        self._take = lru_cache(len(generations.most_nodes) if num_joined == 1 else 1)(self._join)

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Return the sub-graph on the parts whose turn it is."""
        parts = tuple(sorted(self._in_turn(epoch)[number].tolist()))
        return self._take(self.generations.partition(epoch), parts)

    def count(self, epoch: int, number: int) -> Counts:
        """Count the nodes of the sub-graph on these parts."""
        parts, partition = self._in_turn(epoch)[number], self.generations.partition(epoch)
        num_train = self._num_train(partition)[parts].sum()
        return Counts(int(partition.sizes[parts].sum()), int(num_train))

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the directed edges of the sub-graph on these parts."""
        parts = self._in_turn(epoch)[number]
        return int(self._edges(self.generations.partition(epoch))[parts][:, parts].sum())

    def _groups(self, epoch: int) -> list[np.ndarray]:
        """Return the parts of every sub-graph of an epoch."""
        order = epoch_order(self._seed, epoch, len(self.generations.most_nodes))
        q, num_shares = self._num_joined, len(self.shares)
        of_shares = [order[order % num_shares == share] for share in range(num_shares)]
        return [parts[i : i + q] for parts in of_shares for i in range(0, len(parts), q)]

    def _count_training_nodes(self, partition: Partition) -> np.ndarray:
        return np.bincount(partition.parts[self._is_train], minlength=partition.num_parts)

    def _join(self, partition: Partition, parts: Sequence[int]) -> SubGraph:
        nodes = np.concatenate([partition.nodes_of(part) for part in parts])
        nodes.sort()
        indptr, indices = self._induced.on(nodes)
        return SubGraph(nodes, Adjacency(torch.from_numpy(indptr), torch.from_numpy(indices)))


def whole(graph: Graph) -> SubGraph:
    """Return all nodes with all edges."""
    edges = torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices)
    return SubGraph(np.arange(graph.num_nodes), Adjacency(*edges))
