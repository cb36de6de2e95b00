"""The nodes of a graph in chunks, and which of them a chunk needs."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from vigpipe.ops.adjacency import Adjacency
from vigpipe.parallel.switch import cut


class Chunks:
    """The nodes in chunks, each of which has some rows of every rank."""

    def __init__(self, num_chunks: int, of_ranks: Sequence[slice]) -> None:
        self.of_ranks = of_ranks
        cuts = [cut(of_rank, num_chunks) for of_rank in of_ranks]
        self.rows = [list(of_chunk) for of_chunk in zip(*cuts, strict=True)]
        self._last: WeakKeyDictionary[Adjacency, list[int]] = WeakKeyDictionary()

    @property
    def num_nodes(self) -> int:
        return self.of_ranks[-1].stop

    def local(self, of_chunk: Sequence[slice], rank: int) -> slice:
        """Return where a rank's nodes of a chunk are among all nodes of the rank."""
        first = self.of_ranks[rank].start
        return slice(of_chunk[rank].start - first, of_chunk[rank].stop - first)

    def last_needed(self, adjacency: Adjacency) -> list[int]:
        """Return, for each chunk, the last chunk that has edges into it; -1 if none has."""
        if adjacency not in self._last:
            indptr, chunk_of = adjacency.indptr, torch.empty_like(adjacency.indptr[1:])
            for number, of_chunk in enumerate(self.rows):
                for rows in of_chunk:
                    chunk_of[rows] = number
            of_edges = chunk_of[adjacency.indices]
            self._last[adjacency] = [
                max(
                    int(edges.max()) if len(edges) else -1
                    for edges in (of_edges[indptr[r.start] : indptr[r.stop]] for r in of_chunk)
                )
                for of_chunk in self.rows
            ]
        return self._last[adjacency]
