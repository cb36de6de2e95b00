"""FastGCN: the same few nodes stand for all neighbours of a layer.

Chen, Ma, Xiao 2018 (arXiv:1801.10247). In every layer t nodes are drawn, independently and with
replacement, with probability q(u) in proportion to ||A[:, u]||². The edges that come from a node
which was drawn k times count k / (t q(u)) times, so that sums over them have the expected value of
sums over all edges. (Without replacement that would be biased, arXiv:2206.00583.) A node may keep
no edge at all.
"""

import numpy as np

from vigpipe.graphs.graph import Graph, rows_of_kept
from vigpipe.graphs.samplers.aggregation import degrees_of, squared_columns
from vigpipe.graphs.samplers.draws import Urn
from vigpipe.graphs.samplers.layered import Edges
from vigpipe.ops.adjacency import Weighting


class ImportantNodes:
    """Takes the edges that come from nodes which are drawn for the layer.

    Only one thread at a time may call `sample`, which writes to a table; `InLayers` has a lock. The
    weights leave out the self-loops of `gcn`; t is `layer_nodes`. The graph must have edges.
    """

    def __init__(self, graph: Graph, weighting: Weighting, layer_nodes: int) -> None:
        self._graph, self._num = graph, layer_nodes
        plain, looped = degrees_of(graph)
        is_gcn = weighting == "gcn"
        degrees = looped if is_gcn else plain
        norms = squared_columns(graph, weighting, degrees, with_loops=not is_gcn)
        if not norms.any():  # all edges are self-loops, which are not sampled
            norms = np.ones(graph.num_nodes)
        self._shares, self._urn = norms / norms.sum(), Urn(norms)
        self._factors = np.zeros(graph.num_nodes)  # all 0 between calls

    def sample(self, targets: np.ndarray, layer: int, draws: np.random.Generator) -> Edges:
        drawn = self._urn.draw(self._num, draws)
        nodes, times = np.unique_counts(drawn)
        rows, edges = self._graph.edges_into(targets)
        sources = self._graph.indices[edges]
        self._factors[nodes] = times / (self._num * self._shares[nodes])
        factors = self._factors[sources]
        self._factors[nodes] = 0
        is_taken = factors > 0
        nums = np.diff(rows_of_kept(rows, is_taken))
        weights = self._graph.weights_of(edges[is_taken])
        return Edges(nums, sources[is_taken], factors[is_taken], weights)

    def most_sources(self, num_targets: int, layer: int) -> int:
        return self._num
