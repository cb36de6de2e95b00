"""Which node of a graph is in which part, and how many edges that cuts."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from scipy.sparse import coo_array, csr_array

from vigpipe.graphs.graph import Graph

# random    each node draws its part
# metis     few edges between parts of equal size
# metis-train  the same, and each has its share of the training nodes
# spectral  clusters of the eigenvectors of the adjacency, for small graphs
# walks     clusters of an embedding of random walks
Method = Literal["random", "metis", "metis-train", "spectral", "walks"]
METHODS: tuple[str, ...] = get_args(Method)
_NODES_AT_ONCE = 1 << 16  # bounds the memory for their edges


@dataclass(frozen=True, eq=False)
class Partition:
    """A cover of a graph by disjoint parts; every part has a node."""

    method: Method
    parts: np.ndarray  # (n,) int64, the part of each node, from 0
    num_parts: int
    num_edges: int  # directed edges of the graph, self-loops included
    num_kept: int  # those of them with both ends in the same part
    seconds: float  # how long it took to make
    was_read: bool = False  # whether an earlier process has made it, and this one read a file
    read_seconds: float | None = None  # how long reading it took; None if it is in no file

    @property
    def kept_edge_fraction(self) -> float:
        return self.num_kept / self.num_edges if self.num_edges else 1.0

    @property
    def num_cut(self) -> int:
        return self.num_edges - self.num_kept

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.bincount(self.parts, minlength=self.num_parts)

    @property
    def balance(self) -> float:
        return int(self.sizes.max()) * self.num_parts / len(self.parts)

    @cached_property
    def _in_order(self) -> list[np.ndarray]:
        nodes = np.argsort(_small(self.parts, self.num_parts), kind="stable")
        return np.split(nodes, np.cumsum(self.sizes)[:-1])

    def nodes_of(self, part: int) -> np.ndarray:
        """Return the nodes of one part, ascending, int64; not to be changed."""
        return self._in_order[part]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.parts.tobytes()).hexdigest()

    def as_table(self) -> dict[str, object]:
        return {
            "method": self.method,
            "parts": self.num_parts,
            "kept_edge_fraction": self.kept_edge_fraction,
            "cut_edges": self.num_cut,
            "balance": self.balance,
            "seconds": self.seconds,
            "read_seconds": self.read_seconds,
        }

    def __str__(self) -> str:
        came = f"made in {self.seconds:.1f} s{', and read from a file' * self.was_read}"
        return (
            f"{self.num_parts} part{'s' * (self.num_parts != 1)} ({self.method}): "
            f"{100 * self.kept_edge_fraction:.1f} % of the edges kept, {self.num_cut:,} cut, "
            f"largest part {self.balance:.2f} times the mean, {came}"
        )


def measured(
    graph: Graph, method: Method, parts: np.ndarray, num_parts: int, seconds: float
) -> Partition:
    """Count what a partition keeps of a graph's edges; for the arguments see `Partition`."""
    small = _small(parts, num_parts)
    targets = np.repeat(small, np.diff(graph.indptr))
    num_kept = int(np.count_nonzero(small[graph.sources()] == targets))
    return Partition(method, parts, num_parts, graph.num_edges, num_kept, seconds)


def edges_between(graph: Graph, partition: Partition) -> csr_array:
    """Count the directed edges from each part to each, (k, k) int64, by target and source."""
    num_parts = partition.num_parts
    small, counts = _small(partition.parts, num_parts), csr_array((num_parts,) * 2, dtype=np.int64)
    for first in range(0, graph.num_nodes, _NODES_AT_ONCE):
        nodes = slice(first, min(first + _NODES_AT_ONCE, graph.num_nodes))
        ends = graph.indptr[nodes.start : nodes.stop + 1]
        targets = np.repeat(small[nodes], np.diff(ends))
        pairs = targets, small[graph.indices[ends[0] : ends[-1]]]
        ones = np.ones(len(targets), dtype=np.int64)
        counts = counts + coo_array((ones, pairs), counts.shape).tocsr()
    return csr_array(counts)


def _small(parts: np.ndarray, num_parts: int) -> np.ndarray:
    """Return parts as the smallest integers: less memory for each edge, and numpy's radix sort."""
    return parts.astype(np.min_scalar_type(num_parts - 1))
