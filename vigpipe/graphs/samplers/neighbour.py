"""Neighbour sampling of GraphSAGE: some of every node's neighbours, in every layer.

Hamilton, Ying, Leskovec 2017 (arXiv:1706.02216), but without replacement, as torch-geometric and
DGL do. With d neighbours of which f are taken, each counts d / f times, so that means and sums have
the expected value of those over all neighbours.
"""

from collections.abc import Sequence

import numpy as np

from vigpipe.graphs.graph import Graph
from vigpipe.graphs.samplers.draws import subsets
from vigpipe.graphs.samplers.layered import Edges


class Neighbours:
    """Takes at most f of the edges that end in a node, uniformly; the last layer's f is first.

    With f = -1 it takes all of them.
    """

    def __init__(self, graph: Graph, fanouts: Sequence[int]) -> None:
        self._graph, self._degrees = graph, np.diff(graph.indptr)
        largest = int(self._degrees.max(initial=0))
        self._fanouts = [largest if most < 0 else most for most in fanouts]

    def sample(self, targets: np.ndarray, layer: int, draws: np.random.Generator) -> Edges:
        most = self._fanouts[layer]
        starts, degrees = self._graph.indptr[targets], self._degrees[targets]
        nums = np.minimum(degrees, most)
        begins = np.cumsum(nums) - nums
        edges = np.arange(nums.sum()) + np.repeat(starts - begins, nums)  # the first of each
        many = np.flatnonzero(degrees > most)
        chosen = starts[many, None] + subsets(degrees[many], most, draws)
        edges[begins[many, None] + np.arange(most)] = chosen
        factors = np.repeat(degrees / np.maximum(nums, 1), nums)
        return Edges(nums, self._graph.indices[edges], factors, self._graph.weights_of(edges))

    def most_sources(self, num_targets: int, layer: int) -> int:
        """Bound the sources by the neighbours of the nodes that have most."""
        nums = np.minimum(self._degrees, self._fanouts[layer])
        first = len(nums) - num_targets
        return int(np.partition(nums, first)[first:].sum() if first > 0 else nums.sum())
