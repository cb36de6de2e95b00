"""Train on some nodes at a time, with edges that are sampled anew for every layer.

The last layer computes features of the nodes of a batch from their own features and from those of
the sources of sampled edges. The layer before it computes features of all these nodes, and so on.
A node's own features are never left out: neither where an update takes them, nor as the self-loops
of `gcn` and `gcn2`.
"""

from functools import cached_property, lru_cache
from statistics import fmean
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.samplers.aggregation import degrees_of
from vigpipe.graphs.samplers.draws import Sizes, distinct, generator
from vigpipe.graphs.samplers.sampler import Sampler, SubGraph
from vigpipe.job.order import epoch_order
from vigpipe.ops.adjacency import Excerpt, Layered

_NUM_FIRST = 4  # batches that are drawn to estimate how many nodes and edges others have


class Edges(NamedTuple):
    """Sampled edges that end in some nodes."""

    nums: np.ndarray  # (m,) int64, how many end in each of the nodes
    sources: np.ndarray  # (e,) int64, those of the first node's edges first
    factors: np.ndarray  # (e,) float64, for their weights in the whole graph
    weights: np.ndarray | None  # (e,) float32, what the graph says of them


class EdgeSampler(Protocol):
    """Samples the edges of a layer."""

    def sample(self, targets: np.ndarray, layer: int, draws: np.random.Generator) -> Edges:
        """Sample edges that end in the targets, (m,) int64; the last layer has the index 0."""
        ...

    def most_sources(self, num_targets: int, layer: int) -> int:
        """Bound the number of nodes that the edges of a layer come from."""
        ...


class InLayers(Sampler):
    """Every training node once an epoch, in a new order, `batch_nodes` at a time.

    The nodes of a sub-graph are in the order in which they come in, those of the batch first. The
    last batch of an epoch may have fewer. The graph must have training nodes.
    """

    def __init__(
        self, graph: Graph, edge_sampler: EdgeSampler, batch_nodes: int, num_layers: int, seed: int
    ) -> None:
        self._edge_sampler, self._num_layers, self._seed = edge_sampler, num_layers, seed
        self._train, self._degrees = graph.nodes_of(TRAIN), degrees_of(graph)
        self._num_into, self._loop_weights = np.diff(graph.indptr), graph.loop_weights
        self._batch_nodes = min(batch_nodes, len(self._train))
        self.num_sub_graphs = (-(-len(self._train) // self._batch_nodes),)
        self._first = range(min(_NUM_FIRST, self.num_sub_graphs[0]))
        self.most_targets = self.most_nodes = self._batch_nodes
        self._most_rows = [self.most_targets]  # the last layer's first
        for layer in range(num_layers):
            sources = edge_sampler.most_sources(self.most_nodes, layer)
            self.most_nodes = min(graph.num_nodes, self.most_nodes + sources)
            self._most_rows.append(self.most_nodes)
        self._order = lru_cache(2)(lambda epoch: epoch_order(seed, epoch, len(self._train)))
        # The position of each node in the sub-graph that is being drawn; all -1 between calls. The
        # lock guards it from the thread that draws ahead.
        self._positions = np.full(graph.num_nodes, -1, dtype=np.int64)
        self._lock = Lock()
        self._sizes = Sizes()

    def draw(self, epoch: int, number: int) -> SubGraph:
        with self._lock:
            positions = self._positions
            nodes = self._batch(epoch, number)
            try:
                positions[nodes] = np.arange(len(nodes))
                draws = generator(self._seed, epoch, number)
                parts: list[tuple[tuple[np.ndarray, ...], np.ndarray | None]] = []
                for layer in range(self._num_layers):
                    edges = self._edge_sampler.sample(nodes, layer, draws)
                    new = distinct(edges.sources[positions[edges.sources] < 0])
                    nodes = np.concatenate((nodes, new))
                    positions[new] = np.arange(len(nodes) - len(new), len(nodes))
                    parts.append(_in_rows(edges, positions, len(nodes)))
            finally:
                positions[nodes] = -1
        degrees = [torch.from_numpy(of_nodes[nodes]) for of_nodes in self._degrees]
        layers: list[Excerpt] = []
        num_sources = len(nodes)
        loops = self._loop_weights
        for rows, weights in reversed(parts):
            indptr, indices, factors = map(torch.from_numpy, rows)
            of_targets = None if loops is None else loops[nodes[: len(indptr) - 1]]
            layers.append(
                Excerpt(
                    indptr,
                    indices,
                    factors,
                    *(of_nodes[:num_sources] for of_nodes in degrees),
                    edge_weights=None if weights is None else torch.from_numpy(weights),
                    loop_weights=None if of_targets is None else torch.from_numpy(of_targets),
                )
            )
            num_sources = layers[-1].num_targets
        adjacency = Layered(layers)
        self._sizes.put(epoch, number, len(nodes), adjacency.num_edges)
        return SubGraph(nodes, adjacency)

    def most_rows(self, layer: int) -> int:
        return self._most_rows[self._num_layers - layer]

    def num_nodes(self, epoch: int, number: int) -> int:
        return self._size(epoch, number)[0]

    def about_nodes(self, epoch: int, number: int) -> int:
        size = self._sizes.get(epoch, number)
        return size[0] if size else self._mean_nodes

    def num_training_nodes(self, epoch: int, number: int) -> int:
        first = number * self._batch_nodes
        return min(self._batch_nodes, len(self._train) - first)

    def num_edges(self, epoch: int, number: int) -> int:
        return self._size(epoch, number)[1]

    def describe(self) -> str:
        return (
            f"an epoch has {self.num_sub_graphs[0]:,} batches of {self._batch_nodes:,} training "
            f"nodes, whose first layer takes at most {self.most_nodes:,} nodes"
        )

    def as_table(self) -> dict[str, object]:
        num_kept = num_ending = 0
        for number in self._first:
            nodes, adjacency, _ = self.draw(1, number)
            for layer in map(adjacency.of_layer, range(self._num_layers)):
                num_kept += layer.num_edges
                num_ending += int(self._num_into[nodes[: layer.num_targets]].sum())
        return {"kept_edge_fraction": num_kept / num_ending if num_ending else 1.0}

    def _batch(self, epoch: int, number: int) -> np.ndarray:
        first = number * self._batch_nodes
        return np.sort(self._train[self._order(epoch)[first : first + self._batch_nodes]])

    def _size(self, epoch: int, number: int) -> tuple[int, int]:
        size = self._sizes.get(epoch, number)
        if size is None:
            nodes, adjacency, _ = self.draw(epoch, number)
            size = len(nodes), adjacency.num_edges
        return size

    @cached_property
    def _mean_nodes(self) -> int:
        return round(fmean(self.num_nodes(1, number) for number in self._first))


def _in_rows(
    edges: Edges, positions: np.ndarray, num_sources: int
) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """Return `indptr`, `indices` and factors of edges, and weights; sources ascend in each row."""
    rows = np.repeat(np.arange(len(edges.nums)) * num_sources, edges.nums)
    keys = rows + positions[edges.sources]
    order = np.argsort(keys)
    weights = None if edges.weights is None else edges.weights[order]
    indptr = np.append(0, np.cumsum(edges.nums))
    return (indptr, keys[order] - rows, edges.factors[order]), weights
