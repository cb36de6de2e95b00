"""Everything that a layer does along the edges between its nodes.

A layer computes on rows: features, messages and results of the nodes that its rank has. Whatever
follows an edge from one node to another goes through `Edges`. Here one rank has all nodes. Where
several ranks share a graph (`vigpipe.graphs.split`), the same methods fetch what other ranks have,
so that a layer is written only once.
"""

from copy import copy
from typing import NamedTuple, Self

from torch import Tensor, nn

from vigpipe.model.keyed_dropout import pair_keys
from vigpipe.ops import sparse
from vigpipe.ops.adjacency import Adjacency, Weighting
from vigpipe.ops.sparse_rows import SparseRows, linear

Features = Tensor | SparseRows  # (n, C); the graph's own may be sparse


class Added(NamedTuple):
    """What is added where a layer sums and multiplies by weights, (C', C), in either order."""

    bias: Tensor | None = None  # (C',)
    itself: Tensor | None = None  # a factor, (1,), with which a node's own row is added to its sum
    beside: tuple[Features, Tensor] | None = None  # (m, D) and (C', D), whose product is added


NOTHING = Added()


class Edges:
    """The edges between nodes of which one rank has all.

    A rank has n nodes, and the edges end in the first m of them, which usually are all. Methods
    with the names of functions of `ops.sparse` do what these do.
    """

    overlaps: bool = False  # a sum and a product that are asked for together take less time

    def __init__(self, adjacency: Adjacency, *, fused: bool = True) -> None:
        self.adjacency, self.fused = adjacency, fused

    @property
    def num_sources(self) -> int:
        return self.adjacency.num_sources

    @property
    def num_targets(self) -> int:
        return self.adjacency.num_targets

    def of_layer(self, index: int) -> "Edges":
        """Return the edges of a layer: all layers have the same ones."""
        return self

    def suits(self, num_nodes: int, layer: int, num_layers: int) -> bool:
        """Return whether these are edges of so many nodes of the rank; see `Adjacency.suits`."""
        return {self.num_sources, self.num_targets} == {num_nodes}

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of x, (n, ...), of the nodes that edges end in: (m, ...)."""
        return self.adjacency.own(x)

    def with_loops(self) -> Self:
        """Return the edges with a self-loop at every node; existing loops stay."""
        looped = copy(self)
        looped.adjacency = self.adjacency.with_loops()
        return looped

    def sums(self, x: Tensor, weighting: Weighting, added: Tensor | None = None) -> Tensor:
        """Sum what the edges bring, (n, C) -> (m, C); see `ops.sparse.constant_sum`."""
        return sparse.constant_sum(self.adjacency, x, weighting, added, fused=self.fused)

    def sums_then_product(
        self, x: Tensor, weighting: Weighting, weight: Tensor, added: Added = NOTHING
    ) -> Tensor:
        """Take `sums` and multiply them by weights: (n, C) -> (m, C')."""
        itself = None if added.itself is None else added.itself * self.own(x)
        y = linear(self.sums(x, weighting, itself), weight, added.bias)
        return y if added.beside is None else linear(*added.beside, y, fused=self.fused)

    def product_then_sums(
        self, x: Features, weight: Tensor, weighting: Weighting, added: Added = NOTHING
    ) -> Tensor:
        """Multiply by weights and take `sums` of the products: (n, C) -> (m, C')."""
        products = linear(x, weight, fused=self.fused)
        y = self.sums(products, weighting, added.bias)
        y = y if added.itself is None else y + added.itself * self.own(products)
        return y if added.beside is None else linear(*added.beside, y, fused=self.fused)

    def own_and_mean(self, both: Tensor) -> Tensor:
        return sparse.own_and_mean(self.adjacency, both, fused=self.fused)

    def maximum(self, x: Tensor) -> Tensor:
        return sparse.maximum(self.adjacency, x, fused=self.fused)

    def pair_keys(self, keys: Tensor) -> Tensor:
        """Make a key of each edge from those of its ends: (n,) int64 -> (e,) int64."""
        return pair_keys(keys[self.adjacency.targets], keys[self.adjacency.indices])

    def pair_softmax(self, of_sources: Tensor, of_targets: Tensor, slope: float) -> Tensor:
        return sparse.pair_softmax(self.adjacency, of_sources, of_targets, slope, fused=self.fused)

    def pair_scores(self, left: Tensor, right: Tensor, weights: Tensor, slope: float) -> Tensor:
        return sparse.pair_scores(self.adjacency, left, right, weights, slope, fused=self.fused)

    def edge_softmax(self, scores: Tensor) -> Tensor:
        return sparse.edge_softmax(self.adjacency, scores, fused=self.fused)

    def attention_sum(self, shares: Tensor, x: Tensor) -> Tensor:
        by_heads = x.unflatten(1, (shares.shape[1], -1))  # the channels of heads are side by side
        return sparse.attention_sum(self.adjacency, shares, by_heads, fused=self.fused).flatten(1)

    def normalised(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Normalise the rows that a layer has made, (m, C), with the statistics of all nodes."""
        return norm(x)
