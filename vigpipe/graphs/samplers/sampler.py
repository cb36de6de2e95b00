"""What every sampler does: it draws the sub-graphs of an epoch."""

from typing import NamedTuple, Protocol

import numpy as np

from vigpipe.ops.adjacency import Adjacency, Layered


class SubGraph(NamedTuple):
    """Some nodes of a graph, and edges between them.

    Attributes:
        nodes: (b,) int64, each once; ascending, unless the layers have edges of their own.
        adjacency: the edges, whose ends are positions in `nodes`; or the edges of each layer, those
            of the last layer ending in the nodes that are trained on.
        weights: (b,) float64, how often the loss of each node counts; None for once.
    """

    nodes: np.ndarray
    adjacency: Adjacency | Layered
    weights: np.ndarray | None = None


class Sampler(Protocol):
    """Draws the sub-graphs of an epoch; what it draws depends on seed, epoch and number only.

    Attributes:
        num_sub_graphs: how many sub-graphs an epoch has: in one group, from which all replicas
            take; or in a group for each replica, which takes no others. The sub-graphs are numbered
            one group after the other.
        most_nodes: a bound for the nodes of a sub-graph.
        most_targets: a bound for those of them that the last layer makes logits of.
        takes_all: whether every sub-graph is the graph itself.
    """

    num_sub_graphs: tuple[int, ...]
    most_nodes: int
    most_targets: int
    takes_all: bool = False

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Draw a sub-graph of an epoch, which is counted from 1; two threads may do so at once."""
        ...

    def most_rows(self, layer: int) -> int:
        """Bound the nodes that a layer takes, which the layer before it has made."""
        return self.most_nodes

    def num_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes of a sub-graph, also of one that this rank does not draw."""
        ...

    def about_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes of a sub-graph, or return a mean where counting would mean drawing it."""
        return self.num_nodes(epoch, number)

    def num_training_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes whose losses a sub-graph adds up, also those on other ranks."""
        ...

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the directed edges of a sub-graph, also of one that this rank does not draw."""
        ...

    def describe(self) -> str:
        """Tell the user what is drawn; an empty text where there is nothing to tell."""
        return ""

    def as_table(self) -> dict[str, object]:
        """Return what summary.json says of the sampler.

        `kept_edge_fraction`: of all edges of the graph that end in nodes of a sub-graph, or in the
        nodes that a layer makes features of, the fraction that the sub-graph or layer has.
        """
        ...
