"""What every sampler does: it draws the sub-graphs of an epoch."""

from typing import NamedTuple, Protocol

import numpy as np

from vigpipe.ops.adjacency import Adjacency, Layered


class SubGraph(NamedTuple):
    """Some nodes of a graph, and edges between them."""

    nodes: np.ndarray  # (b,) int64, each once; ascending unless the layers have their own edges
    # The ends are positions in `nodes`. Of layers with their own edges, those of the last one end
    # in the nodes that are trained on.
    adjacency: Adjacency | Layered
    weights: np.ndarray | None = None  # (b,) float64, how often losses count; None for once


class Sampler(Protocol):
    """Draws the sub-graphs of an epoch; what it draws depends on seed, epoch and number only."""

    # An epoch has so many sub-graphs: in one group, from which all replicas take; or in a group
    # for each replica, which takes no others. They are numbered one group after the other.
    num_sub_graphs: tuple[int, ...]
    most_nodes: int  # a bound for the nodes of a sub-graph
    most_targets: int  # a bound for those of them that the last layer makes logits of
    takes_all: bool = False  # whether every sub-graph is the graph itself

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

    def has_training_nodes(self, epoch: int, number: int) -> bool:
        """Whether a sub-graph that was drawn has nodes that are trained on."""
        return self.num_training_nodes(epoch, number) > 0

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
