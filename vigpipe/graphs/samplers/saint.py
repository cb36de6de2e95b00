"""GraphSAINT: train on the edges between nodes drawn at random, and undo the bias of the draw.

Zeng, Zhou, Srivastava, Kannan, Prasanna 2020 (arXiv:1907.04931). A node or an edge that is drawn
more often than others would count more. How often each is drawn is counted beforehand, in S
sub-graphs: C_v of them have node v, C_uv have the edge from u to v. In training, the edge has
C_v / C_uv times its weight in the whole graph, and the loss of the node counts S / C_v times.

What comes for the first time in training counts as if it had come once before. In the authors' code
an edge then has the factor 10,000, and a node comes 0.1 times: where sub-graphs are small, so that
many edges were never counted, the loss was thousands of times too large.
"""

import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.samplers.aggregation import degrees_of, squared_columns
from vigpipe.graphs.samplers.draws import Sizes, Urn, distinct, generator
from vigpipe.graphs.samplers.sampler import SubGraph
from vigpipe.ops.adjacency import Kind, Sampled

# Draws nodes, in any order and perhaps several times.
DrawNodes = Callable[[np.random.Generator], np.ndarray]


class Saint:
    """The sub-graph on nodes that are drawn; an epoch draws as many nodes as the graph has.

    What is counted beforehand is drawn as epoch 0. An epoch has n / (mean nodes of a sub-graph)
    sub-graphs, rounded up.

    Args:
        graph: the graph.
        draw_nodes: draws the nodes of a sub-graph.
        most_drawn: how many it draws at most.
        coverage: how often a node is drawn beforehand, on average.
        seed: of all draws.
    """

    takes_all = False

    def __init__(
        self, graph: Graph, draw_nodes: DrawNodes, most_drawn: int, coverage: int, seed: int
    ) -> None:
        began = time.perf_counter()
        self._draw_nodes, self._seed = draw_nodes, seed
        self._degrees, self._induced = degrees_of(graph), Induced(graph)
        self._num_train = len(graph.nodes_of(TRAIN))
        self.most_nodes = self.most_targets = min(graph.num_nodes, most_drawn)
        self._nodes = lru_cache(64)(self._distinct_nodes)
        self._sizes = Sizes()
        self._times_node = np.zeros(graph.num_nodes)
        self._times_edge = np.zeros(graph.num_edges, dtype=np.int32)
        self.num_counted, num_nodes, num_edges = 0, 0, 0
        while num_nodes <= coverage * graph.num_nodes:
            nodes = self._distinct_nodes(0, self.num_counted)
            _, _, edges = self._induced.numbered(nodes)
            self._times_node[nodes] += 1
            self._times_edge[edges] += 1
            self.num_counted += 1
            num_nodes, num_edges = num_nodes + len(nodes), num_edges + len(edges)
        self._mean = num_nodes / self.num_counted, num_edges / self.num_counted
        self.shares = (int(np.ceil(graph.num_nodes / self._mean[0])),)
        self._seconds = time.perf_counter() - began

    def draw(self, epoch: int, number: int) -> SubGraph:
        """Return the sub-graph on the nodes that are drawn."""
        nodes = self._nodes(epoch, number)
        indptr, indices, edges = self._induced.numbered(nodes)
        self._sizes.put(epoch, number, len(nodes), len(edges))
        times = np.maximum(self._times_node[nodes], 1)
        factors = np.repeat(times, np.diff(indptr)) / np.maximum(self._times_edge[edges], 1)
        arrays = indptr, indices, factors, self._degrees.plain[nodes], self._degrees.looped[nodes]
        return SubGraph(nodes, Sampled(*map(torch.from_numpy, arrays)), self.num_counted / times)

    def most_rows(self, layer: int) -> int:
        """Return the same bound for all layers."""
        return self.most_nodes

    def num_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes that are drawn."""
        return len(self._nodes(epoch, number))

    def about_nodes(self, epoch: int, number: int) -> int:
        """Count the nodes that were drawn, or say how many are on average."""
        size = self._sizes.get(epoch, number)
        return size[0] if size else round(self._mean[0])

    def num_training_nodes(self, epoch: int, number: int) -> int:
        """Count those of the whole graph, for which the weighted ones of a sub-graph stand."""
        return self._num_train

    def num_edges(self, epoch: int, number: int) -> int:
        """Count the edges between the nodes that are drawn."""
        size = self._sizes.get(epoch, number)
        return size[1] if size else len(self._induced.numbered(self._nodes(epoch, number))[1])

    def describe(self) -> str:
        """Say what was counted beforehand."""
        nodes, edges = self._mean
        return (
            f"{self.num_counted:,} sub-graphs drawn to count how often nodes and edges come, with "
            f"{nodes:,.0f} nodes and {edges:,.0f} edges on average, in {self._seconds:.1f} s; "
            f"an epoch has {self.shares[0]:,}"
        )

    def as_table(self) -> dict[str, object]:
        """Return what was counted beforehand."""
        nodes, edges = self._mean
        return {
            "counted": {
                "sub_graphs": self.num_counted,
                "mean_nodes": nodes,
                "mean_edges": edges,
                "seconds": self._seconds,
            }
        }

    def _distinct_nodes(self, epoch: int, number: int) -> np.ndarray:
        return distinct(self._draw_nodes(generator(self._seed, epoch, number)))


def by_nodes(graph: Graph, kind: Kind, num: int) -> DrawNodes:
    """Draw nodes with a probability in proportion to their squared column norm.

    The columns are those of the adjacency matrix with a self-loop at every node, so that each can
    be drawn: of the model's own for `gcn`, else normalised by rows.

    Args:
        graph: the graph.
        kind: which weights the model's sums have.
        num: how many nodes to draw, with replacement.
    """
    degrees = degrees_of(graph).looped
    same = "gcn" if kind == "gcn" else "mean"
    of_others = squared_columns(graph, same, degrees, with_loops=False)
    urn = Urn(of_others + (1 / degrees) ** 2)
    return lambda draws: urn.draw(num, draws)


def by_edges(graph: Graph, num: int) -> DrawNodes:
    """Draw both ends of edges between u and v with a probability ~ 1 / deg u + 1 / deg v.

    That has the least variance. A node without edges is never drawn.

    Args:
        graph: the graph, which has edges.
        num: how many edges to draw, with replacement.
    """
    degrees = np.diff(graph.indptr)
    targets = graph.targets()
    inverses = 1 / np.maximum(degrees, 1)
    urn = Urn(inverses[targets] + inverses[graph.indices])

    def draw(draws: np.random.Generator) -> np.ndarray:
        edges = urn.draw(num, draws)
        of_edges = np.searchsorted(graph.indptr, edges, side="right") - 1
        return np.concatenate((of_edges, graph.indices[edges]))

    return draw


def by_walks(graph: Graph, num_roots: int, length: int) -> DrawNodes:
    """Draw the nodes of random walks, whose roots are drawn uniformly, with replacement.

    A step goes to a node that an edge comes from; a node without such edges is not left.

    Args:
        graph: the graph.
        num_roots: how many walks.
        length: steps of each.
    """
    degrees = np.diff(graph.indptr)

    def draw(draws: np.random.Generator) -> np.ndarray:
        walks = np.empty((length + 1, num_roots), dtype=np.int64)
        walks[0] = draws.integers(graph.num_nodes, size=num_roots)
        for step in range(length):
            nodes, numbers = walks[step], draws.random(num_roots)
            offsets = (numbers * degrees[nodes]).astype(np.int64)
            goes_on = degrees[nodes] > 0
            walks[step + 1] = nodes
            edges = (graph.indptr[nodes] + offsets)[goes_on]
            walks[step + 1, goes_on] = graph.indices[edges]
        return walks.ravel()

    return draw
