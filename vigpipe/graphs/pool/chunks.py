"""How many chunks pay, and when a pool can sum each."""

from vigpipe.graphs.chunks import Chunks
from vigpipe.ops.adjacency import Adjacency

MOST_CHUNKS, LEAST_ROWS = 16, 512  # smaller chunks would cost more than they let overlap


def chunks_that_pay(num_nodes: int) -> Chunks:
    """Cut the nodes of one rank into as many chunks as pay."""
    return Chunks(max(1, min(MOST_CHUNKS, num_nodes // LEAST_ROWS)), [slice(0, num_nodes)])


def turns(chunks: Chunks, adjacency: Adjacency) -> list[list[int]]:
    """Return which chunks can be summed as soon as chunk 0, 1, ... of the sources is there.

    A chunk comes with the last one that it has edges from, and with the first if it has none.
    """
    ready: list[list[int]] = [[] for _ in chunks.rows]
    for number, last in enumerate(chunks.last_needed(adjacency)):
        ready[max(0, last)].append(number)
    return ready
