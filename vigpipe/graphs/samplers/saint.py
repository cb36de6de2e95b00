"""GraphSAINT: train on the edges between nodes drawn at random, and undo the bias of the draw.

Zeng, Zhou, Srivastava, Kannan, Prasanna 2020 (arXiv:1907.04931). A node or an edge that is drawn
more often than others would count more. How often each is drawn is counted beforehand, in S
sub-graphs: C_v of them have node v, C_uv have the edge from u to v. In training, the edge has
C_v / C_uv times its weight in the whole graph, and the loss of the node counts S / C_v times.

What comes for the first time in training counts as if it had come once before. In the authors' code
an edge then has the factor 10,000, and a node comes 0.1 times: where sub-graphs are small, so that
many edges were never counted, the loss was thousands of times too large.
"""

from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph, random_walks
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.samplers.aggregation import degrees_of, inverse, squared_columns
from vigpipe.graphs.samplers.counts import Counts
from vigpipe.graphs.samplers.draws import DrawNodes, Sizes, Urn, distinct_nodes
from vigpipe.graphs.samplers.sampler import Sampler, SubGraph
from vigpipe.graphs.samplers.whole import weight_tensor
from vigpipe.ops.adjacency import Excerpt


class Saint(Sampler):
    """The sub-graph on nodes that are drawn; an epoch draws as many nodes as the graph has.

    An epoch has n / (mean nodes of a sub-graph) sub-graphs, rounded up. `draw_nodes` draws at most
    `most_drawn` nodes, and has drawn those that were counted; `can_come`, (n,) bool, are the nodes
    that it ever draws, by default all.
    """

    def __init__(
        self,
        graph: Graph,
        draw_nodes: DrawNodes,
        most_drawn: int,
        counts: Counts,
        seed: int,
        can_come: np.ndarray | None = None,
    ) -> None:
        self.counts = counts
        self._graph, self._degrees, self._induced = graph, degrees_of(graph), Induced(graph)
        self._is_train = graph.split == TRAIN
        can_train = self._is_train if can_come is None else self._is_train & can_come
        self._num_train = int(np.count_nonzero(can_train))
        self.most_nodes = self.most_targets = min(graph.num_nodes, most_drawn)
        self._nodes = lru_cache(64)(partial(distinct_nodes, draw_nodes, seed))
        self._sizes = Sizes()
        self.num_sub_graphs = (int(np.ceil(graph.num_nodes / counts.mean_nodes)),)

    def draw(self, epoch: int, number: int) -> SubGraph:
        nodes = self._nodes(epoch, number)
        indptr, indices, edges = self._induced.on(nodes)
        self._sizes.put(epoch, number, len(nodes), len(edges))
        times = np.maximum(self.counts.of_nodes[nodes], 1)
        factors = np.repeat(times, np.diff(indptr)) / np.maximum(self.counts.of_edges[edges], 1)
        degrees = (of_nodes[nodes] for of_nodes in self._degrees)
        tensors = map(torch.from_numpy, (indptr, indices, factors, *degrees))
        excerpt = Excerpt(*tensors, edge_weights=weight_tensor(self._graph, edges))
        return SubGraph(nodes, excerpt, self.counts.num_drawn / times)

    def num_nodes(self, epoch: int, number: int) -> int:
        return len(self._nodes(epoch, number))

    def about_nodes(self, epoch: int, number: int) -> int:
        size = self._sizes.get(epoch, number)
        return size[0] if size else round(self.counts.mean_nodes)

    def num_training_nodes(self, epoch: int, number: int) -> int:
        """Count those that can come, which the weighted nodes of a sub-graph stand for."""
        return self._num_train

    def has_training_nodes(self, epoch: int, number: int) -> bool:
        return bool(self._is_train[self._nodes(epoch, number)].any())

    def num_edges(self, epoch: int, number: int) -> int:
        size = self._sizes.get(epoch, number)
        return size[1] if size else len(self._induced.on(self._nodes(epoch, number))[1])

    def describe(self) -> str:
        counts, num_lost = self.counts, int(np.count_nonzero(self._is_train)) - self._num_train
        lost = f"; {num_lost:,} training nodes have no edge and never come" if num_lost else ""
        came = f"counted in {counts.seconds:.1f} s{', and read from a file' * counts.was_read}"
        return (
            f"{counts.num_drawn:,} sub-graphs drawn to count how often nodes and edges come, with "
            f"{counts.mean_nodes:,.0f} nodes and {counts.mean_edges:,.0f} edges on average, "
            f"{came}; an epoch has {self.num_sub_graphs[0]:,}{lost}"
        )

    def as_table(self) -> dict[str, object]:
        counts = self.counts
        num_ending = int(counts.of_nodes @ np.diff(self._graph.indptr))
        return {
            "kept_edge_fraction": int(counts.of_edges.sum()) / num_ending if num_ending else 1.0,
            "counted": {
                "sub_graphs": counts.num_drawn,
                "mean_nodes": counts.mean_nodes,
                "mean_edges": counts.mean_edges,
                "seconds": counts.seconds,
                "read_seconds": counts.read_seconds,
            },
        }


def by_nodes(graph: Graph, weighting: Literal["gcn", "mean"], num: int) -> DrawNodes:
    """Draw `num` nodes with replacement, in proportion to their squared column norm.

    The columns are those of the adjacency matrix with a self-loop at every node, so that every node
    can be drawn: of the model's own matrix for `gcn`, otherwise of the one normalised by rows.
    """
    degrees = degrees_of(graph).looped
    norms = squared_columns(graph, weighting, degrees, with_loops=True)
    urn = Urn(norms + np.where(graph.lacks_loop, inverse(degrees) ** 2, 0))
    return lambda draws: urn.draw(num, draws)


def by_edges(graph: Graph, num: int) -> DrawNodes:
    """Draw both ends of `num` edges with replacement, in proportion to 1 / deg u + 1 / deg v.

    That has the least variance. Where edges have weights, the sum is multiplied by the weight. A
    node without edges is never drawn. The graph must have edges.
    """
    inverses, weights = inverse(degrees_of(graph).plain), graph.weights_of(slice(None))
    of_edges = inverses[graph.targets()] + inverses[graph.sources()]
    urn = Urn(of_edges if weights is None else of_edges * weights)

    def draw(draws: np.random.Generator) -> np.ndarray:
        edges = urn.draw(num, draws)
        of_edges = np.searchsorted(graph.indptr, edges, side="right") - 1
        return np.concatenate((of_edges, graph.indices[edges]))

    return draw


def by_walks(graph: Graph, num_roots: int, length: int) -> DrawNodes:
    """Draw the nodes of walks of `length` steps, from uniformly drawn roots, with replacement."""

    def draw(draws: np.random.Generator) -> np.ndarray:
        roots = draws.integers(graph.num_nodes, size=num_roots)
        return random_walks(graph.indptr, graph.indices, roots, length, draws).ravel()

    return draw
