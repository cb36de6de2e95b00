"""The nodes of a graph in chunks, and which of them a chunk needs."""

from itertools import pairwise
from weakref import WeakKeyDictionary

from vigpipe.ops.adjacency import Adjacency

MOST_CHUNKS, LEAST_ROWS = 16, 512  # smaller chunks would cost more than they let overlap


class Chunks:
    """Chunks of neighbouring nodes, of about equal size.

    Args:
        num_nodes: n.
        num_chunks: how many; by default as many as pay.

    Attributes:
        num_nodes: n.
        rows: the nodes of each chunk.
    """

    def __init__(self, num_nodes: int, num_chunks: int | None = None) -> None:
        if num_chunks is None:
            num_chunks = max(1, min(MOST_CHUNKS, num_nodes // LEAST_ROWS))
        ends = [num_nodes * i // num_chunks for i in range(num_chunks + 1)]
        self.num_nodes = num_nodes
        self.rows = [slice(*pair) for pair in pairwise(ends)]
        self._turns: WeakKeyDictionary[Adjacency, list[list[slice]]] = WeakKeyDictionary()

    def turns(self, adjacency: Adjacency) -> list[list[slice]]:
        """Return which chunks can be summed as soon as chunk 0, 1, ... of the sources is there.

        A chunk comes with the last one that it has edges from, and with the first if it has none.
        """
        if adjacency not in self._turns:
            turns: list[list[slice]] = [[] for _ in self.rows]
            for rows in self.rows:
                first, last = (int(adjacency.indptr[end]) for end in (rows.start, rows.stop))
                source = int(adjacency.indices[first:last].max()) if last > first else -1
                turns[max(0, sum(of.start <= source for of in self.rows) - 1)].append(rows)
            self._turns[adjacency] = turns
        return self._turns[adjacency]
