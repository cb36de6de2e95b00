"""Edges over which a pool of threads sums, while the rank multiplies."""

from typing import Any

from torch import Tensor

from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.pool.products import ProductThenSums, SumsAlone, SumsThenProduct
from vigpipe.graphs.pool.sums import PooledSums
from vigpipe.graphs.split.sums import WholeSums
from vigpipe.model.gnn.edges import NOTHING, Added, Edges, Features
from vigpipe.ops.adjacency import Adjacency, Weighting
from vigpipe.ops.sparse_rows import linear


class PooledEdges(Edges):
    """The edges of a graph on the host, over which the pool sums chunk by chunk of its nodes."""

    overlaps = True

    def __init__(
        self, adjacency: Adjacency, pool: Pool, chunks: Chunks, *, fused: bool = True
    ) -> None:
        super().__init__(adjacency, fused=fused)
        self._pool, self._chunks = pool, chunks

    def sums(self, x: Tensor, weighting: Weighting, added: Tensor | None = None) -> Tensor:
        y: Any = SumsAlone.apply(x.contiguous(), added, self._sums(weighting))
        return y

    def sums_then_product(
        self, x: Tensor, weighting: Weighting, weight: Tensor, added: Added = NOTHING
    ) -> Tensor:
        itself = None if added.itself is None else added.itself * x
        own, sums = _dense(added.beside), self._sums(weighting)
        y: Any = SumsThenProduct.apply(x.contiguous(), itself, weight, added.bias, *own, sums)
        return self._with_sparse(y, added.beside)

    def product_then_sums(
        self, x: Features, weight: Tensor, weighting: Weighting, added: Added = NOTHING
    ) -> Tensor:
        if not isinstance(x, Tensor):  # sparse rows are multiplied at once
            return super().product_then_sums(x, weight, weighting, added)
        own, sums = _dense(added.beside), self._sums(weighting)
        both: Any = ProductThenSums.apply(x.contiguous(), weight, added.bias, *own, sums)
        y, products = both
        y = y if added.itself is None else y + added.itself * products
        return self._with_sparse(y, added.beside)

    def _with_sparse(self, y: Tensor, beside: tuple[Features, Tensor] | None) -> Tensor:
        """Add the product of sparse rows, which is not made in chunks."""
        if beside is None or isinstance(beside[0], Tensor):
            return y
        return linear(*beside, y, fused=self.fused)

    def _sums(self, weighting: Weighting) -> PooledSums:
        whole = WholeSums(self.adjacency, weighting, self.fused)
        return PooledSums(self._pool, self._chunks, whole)


def _dense(beside: tuple[Features, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors of a product, or None for each without one, or with sparse rows."""
    if beside is None or not isinstance(beside[0], Tensor):
        return None, None
    return beside[0].contiguous(), beside[1]
