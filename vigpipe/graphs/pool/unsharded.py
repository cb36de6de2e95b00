"""One rank that has all of a sub-graph, and sums in a pool while it trains."""

import torch

from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.pool.edges import PooledEdges
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.split.sharding import Shard, Unsharded
from vigpipe.ops.adjacency import Adjacency

MOST_CHUNKS, LEAST_ROWS = 16, 512  # smaller chunks would cost more than they let overlap


class UnshardedWithPool(Unsharded):
    """One rank, which has all, and a pool of threads for its sums: --sparse-threads.

    The pool sums on the CPU, also where the rank computes on a GPU. Evaluations sum where the rank
    computes, because they take one layer after the other in chunks of nodes.
    """

    def __init__(self, num_threads: int, *, fused: bool) -> None:
        self._fused, self._pool = fused, Pool(num_threads)
        self._chunks = Chunks(1, [slice(0, 0)])
        self._last: tuple[Adjacency, Adjacency] | None = None  # on a GPU, and on the host

    def at_step(self, shard: Shard, step: int, device: torch.device) -> Shard:
        assert isinstance(shard.edges, Adjacency)  # `check_job` has refused others
        num_nodes = shard.edges.num_targets
        if self._chunks.num_nodes != num_nodes:
            num_chunks = max(1, min(MOST_CHUNKS, num_nodes // LEAST_ROWS))
            self._chunks = Chunks(num_chunks, [slice(0, num_nodes)])
        adjacency = shard.edges if device.type == "cpu" else self._on_host(shard.edges)
        edges = PooledEdges(adjacency, self._pool, self._chunks, fused=self._fused)
        return shard._replace(edges=edges)

    def _on_host(self, adjacency: Adjacency) -> Adjacency:
        """Return a copy on the host, for the same edges the same copy: the whole graph recurs."""
        if self._last is None or self._last[0] is not adjacency:
            self._last = adjacency, adjacency.to(torch.device("cpu"))
        return self._last[1]

    def finish(self) -> None:
        self._pool.close()
