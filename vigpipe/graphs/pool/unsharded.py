"""One rank that has all of a sub-graph, and sums in a pool while it trains."""

from functools import lru_cache

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
        # The whole graph recurs: its copy is kept, with what is derived from it.
        self._on_host = lru_cache(1)(lambda adjacency: adjacency.to(torch.device("cpu")))

    def at_step(self, shard: Shard, step: int, device: torch.device) -> Shard:
        assert isinstance(shard.edges, Adjacency)  # `check_job` has refused others
        num_nodes = shard.edges.num_targets
        if self._chunks.num_nodes != num_nodes:
            num_chunks = max(1, min(MOST_CHUNKS, num_nodes // LEAST_ROWS))
            self._chunks = Chunks(num_chunks, [slice(0, num_nodes)])
        adjacency = shard.edges if device.type == "cpu" else self._on_host(shard.edges)
        edges = PooledEdges(adjacency, self._pool, self._chunks, fused=self._fused)
        return shard._replace(edges=edges)

    def finish(self) -> None:
        self._pool.close()
