"""What every sampler does: it draws the sub-graphs of an epoch."""

from typing import NamedTuple, Protocol

import numpy as np

from vigpipe.ops.adjacency import Adjacency, Layered


class SubGraph(NamedTuple):
    """Some nodes of a graph, and edges between them.

    Attributes:
        nodes: (b,) int64, each once; ascending, unless the layers have edges of their own.
        adjacency: the edges, between places in `nodes`; or those of each layer, of which the last
            ends in the nodes that are trained on.
        weights: (b,) float64, how often the loss of each node counts; None for once.
    """

    nodes: np.ndarray
    adjacency: Adjacency | Layered
    weights: np.ndarray | None = None


class Sampler(Protocol):
    """Draws the sub-graphs of an epoch; what it draws depends on seed, epoch and number only.

    Attributes:
        shares: number of sub-graphs of an epoch, all of them in one share; or one share for each
            replica, which takes no others. The sub-graphs are numbered one share after the other.
        most_nodes: a bound for the nodes of a sub-graph.
        most_targets: a bound for those of them that the last layer makes logits of.
        takes_all: whether every sub-graph is the graph itself.
    """

    shares: tuple[int, ...]
    most_nodes: int
    most_targets: int
    takes_all: bool

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Draw a sub-graph of an epoch, which is counted from 1; two threads may do so at once."""
        ...

    def most_rows(self, layer: int) -> int:
        """Bound the nodes that a layer takes, which the one before it has made."""
        ...

    def num_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes of a sub-graph, also of one that this rank does not draw."""
        ...

    def about_nodes(self, epoch: int, number: int) -> int:
        """Return the nodes of a sub-graph, or a mean where it would have to be drawn for that."""
        ...

    def num_training_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes that the loss of a sub-graph is the sum over; every rank counts all."""
        ...

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the directed edges of a sub-graph, also of those that this rank does not draw."""
        ...

    def describe(self) -> str:
        """Say for the user what is drawn; nothing where there is nothing to say."""
        ...

    def as_table(self) -> dict[str, object]:
        """Return what summary.json says of it.

        `kept_edge_fraction` is the share of the edges that end in nodes of a sub-graph which are in
        it, or of those that end in nodes which a layer makes features of.
        """
        ...
