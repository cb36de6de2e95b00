"""Nodes split for what acts on each node, channels split for what acts on each channel (MixGCN).

A layer multiplies, drops out and normalises rows, of which every rank has some. A sum or a maximum
over edges takes each channel by itself, so that a rank can do some of the channels for all nodes,
without a partition of the graph and without copies of boundary nodes; between the two forms the
ranks switch (`vigpipe.parallel.switch`). Every rank has all edges.
"""

from typing import Any

import torch
from torch import Tensor

from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.split.shared import SharedEdges
from vigpipe.graphs.split.sums import ProductColumns, Sums, SwitchedSums, WholeSums
from vigpipe.model.gnn.edges import NOTHING, Added, Features
from vigpipe.ops.adjacency import Adjacency, Weighting
from vigpipe.ops.sparse_rows import linear
from vigpipe.parallel.shards import Shards
from vigpipe.parallel.switch import SCORES, all_rows, to_columns, to_rows, total


class MixedEdges(SharedEdges):
    """The edges between nodes of which a rank has the rows, or some columns of all.

    Methods take and return rows of this rank's nodes, `shards.own(n)`, except for keys and weights
    of edges, (e, ...), which are the same on all ranks.
    """

    def __init__(
        self,
        adjacency: Adjacency,
        shards: Shards,
        features: Tensor | None = None,
        *,
        chunks: int = 1,
        fused: bool = True,
    ) -> None:
        self._num_nodes = num_nodes = adjacency.num_targets
        super().__init__(adjacency, shards, shards.count(num_nodes), features, fused=fused)
        # Ranks that write into each other's memory have nothing to send in chunks.
        in_chunks = chunks > 1 and not shards.can_write
        self._chunks = Chunks(chunks, shards.slices(num_nodes)) if in_chunks else None
        self.overlaps = shards.can_write

    def sums(self, x: Tensor, weighting: Weighting, added: Tensor | None = None) -> Tensor:
        columns = self._to_columns(x) if self._is_features(x) else None
        sums = self._sums(weighting)
        y: Any = SwitchedSums.apply(x, columns, added, sums, self.shards, self._chunks)
        return y

    def product_then_sums(
        self, x: Features, weight: Tensor, weighting: Weighting, added: Added = NOTHING
    ) -> Tensor:
        """Write products where they are summed."""
        is_autocast = torch.is_autocast_enabled(weight.device.type)
        if added.itself is not None or is_autocast or not isinstance(x, Tensor):
            return super().product_then_sums(x, weight, weighting, added)
        rows_and_columns: Any = ProductColumns.apply(x, weight, self._num_nodes, self.shards)
        sums = self._sums(weighting)
        y: Any = SwitchedSums.apply(*rows_and_columns, added.bias, sums, self.shards, None)
        return y if added.beside is None else linear(*added.beside, y, fused=self.fused)

    def _sums(self, weighting: Weighting) -> Sums:
        return WholeSums(self.adjacency, weighting, self.fused)

    def maximum(self, x: Tensor) -> Tensor:
        return to_rows(super().maximum(self._to_columns(x)), self.shards, x.shape[1])

    def pair_keys(self, keys: Tensor) -> Tensor:
        counts = self.shards.counts(self._num_nodes)
        return super().pair_keys(self.shards.gathered(keys, counts, SCORES))

    def pair_softmax(self, of_sources: Tensor, of_targets: Tensor, slope: float) -> Tensor:
        ends = torch.cat((of_sources, of_targets), 1)
        of_sources, of_targets = all_rows(ends, self.shards, self._num_nodes).chunk(2, 1)
        return super().pair_softmax(of_sources, of_targets, slope)

    def pair_scores(self, left: Tensor, right: Tensor, weights: Tensor, slope: float) -> Tensor:
        """Score all edges with the rank's columns of each head, and add up."""
        heads = len(weights)
        columns = self._to_columns(left, heads), self._to_columns(right, heads)
        self._scored = left, columns[0]
        own = weights[:, self.shards.own(weights.shape[1])]
        return total(super().pair_scores(*columns, own.contiguous(), slope), self.shards)

    def attention_sum(self, shares: Tensor, x: Tensor) -> Tensor:
        heads, columns = shares.shape[1], self._take_scored(x)
        if columns is None:
            columns = self._to_columns(x, heads)
        sums = super().attention_sum(shares, columns)
        return to_rows(sums, self.shards, x.shape[1], heads)

    def _to_columns(self, x: Tensor, heads: int = 1) -> Tensor:
        return self._fetch_once(x, lambda: to_columns(x, self.shards, self._num_nodes, heads))
