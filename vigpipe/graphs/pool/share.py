"""One rank that has all of a sub-graph, and sums in a pool while it trains."""

import torch

from vigpipe.graphs.pool.chunks import chunks_that_pay
from vigpipe.graphs.pool.edges import PooledEdges
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.split.share import Alone, Share
from vigpipe.ops.adjacency import Adjacency


class AloneWithPool(Alone):
    """One rank, which has all, and a pool of threads for its sums: --sparse-threads.

    The pool sums on the CPU, also where the rank computes on a GPU. Evaluations sum where the rank
    computes, because they take one layer after the other in chunks of nodes.

    Args:
        num_threads: of the pool.
        fused: use the fused kernels where there are any.
    """

    def __init__(self, num_threads: int, *, fused: bool) -> None:
        self._fused, self._pool = fused, Pool(num_threads)
        self._chunks = chunks_that_pay(0)
        self._last: tuple[Adjacency, Adjacency] | None = None  # on a GPU, and on the host

    def at_step(self, share: Share, step: int, device: torch.device) -> Share:
        """Return the same, with edges that are summed in the pool."""
        assert isinstance(share.edges, Adjacency)  # `check_job` has refused others
        num_nodes = share.edges.num_targets
        if self._chunks.num_nodes != num_nodes:
            self._chunks = chunks_that_pay(num_nodes)
        adjacency = share.edges if device.type == "cpu" else self._on_host(share.edges)
        edges = PooledEdges(adjacency, self._pool, self._chunks, fused=self._fused)
        return share._replace(edges=edges)

    def _on_host(self, adjacency: Adjacency) -> Adjacency:
        """Return a copy on the host; of the whole graph, which comes again, the same one."""
        if self._last is None or self._last[0] is not adjacency:
            self._last = adjacency, adjacency.to(torch.device("cpu"))
        return self._last[1]

    def finish(self) -> None:
        """End the pool."""
        self._pool.close()
