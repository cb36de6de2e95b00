"""One rank that has all of a sub-graph, and sums in a pool while it trains."""

import torch

from vigpipe.errors import InputError
from vigpipe.graphs.pool.chunks import chunks_that_pay
from vigpipe.graphs.pool.edges import PooledEdges
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.split.share import Alone, Share
from vigpipe.ops.adjacency import Adjacency


class AloneWithPool(Alone):
    """One rank, which has all, and a pool of threads for its sums: --sparse-threads.

    Evaluations sum on the rank's own threads, because they take one layer after the other in chunks
    of nodes.

    Args:
        num_threads: of the pool.
        device: where the rank computes.
        fused: use the fused kernels where there are any.

    Raises:
        InputError: the device is not the CPU.
    """

    def __init__(self, num_threads: int, device: torch.device, *, fused: bool) -> None:
        if device.type != "cpu":
            raise InputError(
                f"--sparse-threads {num_threads}: sums on threads of the CPU, and the rank "
                f"computes on {device.type}; leave it out, or choose --device cpu"
            )
        self._fused, self._pool = fused, Pool(num_threads)
        self._chunks = chunks_that_pay(0)

    def at_step(self, share: Share, step: int, device: torch.device) -> Share:
        """Return the same, with edges that are summed in the pool."""
        assert isinstance(share.edges, Adjacency)  # `check_job` has refused others
        num_nodes = share.edges.num_targets
        if self._chunks.num_nodes != num_nodes:
            self._chunks = chunks_that_pay(num_nodes)
        edges = PooledEdges(share.edges, self._pool, self._chunks, fused=self._fused)
        return share._replace(edges=edges)

    def finish(self) -> None:
        """End the pool."""
        self._pool.close()
