"""One large graph: its edges, and what its nodes carry, in memory or in files."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array

from vigpipe.graphs.choices import Choices
from vigpipe.graphs.stored_rows import StoredRows
from vigpipe.ops.transpose import is_symmetric

NO_CLASS = -1  # the label of a node without one
UNKNOWN = -1  # in labels of several classes, where 1 is a class that a node has, and 0 another
_NUMBERS_AT_ONCE = 1 << 22  # of what a digest is made of
TRAIN, VALIDATION, TEST, NO_SPLIT = 0, 1, 2, -1  # which part of the split a node belongs to
SPLITS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


@dataclass(frozen=True, eq=False)
class Graph:
    """One large graph."""

    name: str  # what the user calls it
    # The edges that end in node v have the numbers indptr[v] ... indptr[v + 1] - 1.
    indptr: np.ndarray  # (n + 1,) int64
    # Each edge comes from one of these nodes, which ascend for each v. No edge is repeated; there
    # may be self-loops. Of edges in files, memory holds what is indexed.
    indices: np.ndarray | StoredRows  # (e,) int64
    features: np.ndarray | csr_array | StoredRows  # (n, d) float32
    # (n,) int64, NO_CLASS for none; or if a node may have several classes, (n, C) int8: 1 for each
    # that it has, 0 for those that it has not, and UNKNOWN.
    labels: np.ndarray
    split: np.ndarray  # (n,) int8: TRAIN, VALIDATION, TEST or NO_SPLIT, as nodes without a class
    class_names: tuple[str, ...]
    node_names: tuple[str, ...] | None = None
    # What tf-idf has multiplied each feature by, (d,) float32; None for other features.
    feature_weights: np.ndarray | None = None
    numbers: np.ndarray | None = None  # (n,) int64, in the user's files; None if they are the same
    edge_weights: np.ndarray | StoredRows | None = None  # (e,) float32 above 0; None if all are 1
    choices: Choices | None = None  # how its features were made of columns, if that is known
    notes: tuple[str, ...] = ()  # how it was read, which the user should know before a run

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def num_features(self) -> int:
        shape: Any = self.features.shape  # scipy says it can be None
        return shape[1]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def is_multi_label(self) -> bool:
        return self.labels.ndim == 2

    def nodes_of(self, split: int) -> np.ndarray:
        """Return the nodes of TRAIN, VALIDATION or TEST, ascending, int64."""
        return np.flatnonzero(self.split == split)

    def numbers_of(self, nodes: np.ndarray) -> np.ndarray:
        return nodes if self.numbers is None else self.numbers[nodes]

    def name_of(self, node: int) -> str:
        """Return the name of a node; if nodes have none, its number in the user's files."""
        if self.node_names is None:
            return f"node {self.numbers_of(np.array(node))}"
        return self.node_names[node]

    def edges_into(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return edges_into(self.indptr, nodes)

    def weights_of(self, edges: np.ndarray | slice) -> np.ndarray | None:
        """Return the weights of edges, by their numbers; None if all are 1."""
        return None if self.edge_weights is None else self.edge_weights[edges]

    def sources(self) -> np.ndarray:
        """Return the node that each edge comes from, (e,) int64, all of them in memory."""
        return np.asarray(self.indices)

    def targets(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))

    @cached_property
    def loops(self) -> np.ndarray:
        """The nodes that have an edge to themselves, ascending, int64."""
        sources = self.sources()
        return sources[sources == self.targets()]

    @cached_property
    def lacks_loop(self) -> np.ndarray:
        """Which nodes have no edge to themselves, (n,) bool."""
        lacks = np.ones(self.num_nodes, np.bool_)
        lacks[self.loops] = False
        return lacks

    @cached_property
    def degrees(self) -> np.ndarray:
        """How many edges end in each node, (n,) int64, or how much they weigh, float64."""
        weights = self.weights_of(slice(None))
        if weights is None:
            return np.diff(self.indptr)
        return np.bincount(self.targets(), weights, self.num_nodes)

    @cached_property
    def loop_weights(self) -> np.ndarray | None:
        """The weight of each node's edge to itself, (n,) float32; 1 for one that is added."""
        weights = self.weights_of(slice(None))
        if weights is None:
            return None
        of_loops = np.ones(self.num_nodes, np.float32)
        of_loops[self.loops] = weights[self.sources() == self.targets()]
        return of_loops

    @cached_property
    def features_sha256(self) -> str:
        """The SHA-256 of the features, of the nodes as they are numbered here."""
        rows: Any = self.features
        arrays = [(rows, rows.dtype)]
        if isinstance(rows, csr_array):
            arrays = [(rows.indptr, np.int64), (rows.indices, np.int64), (rows.data, rows.dtype)]
        digest = hashlib.sha256(repr(rows.shape).encode())
        for array, dtype in arrays:
            at_once = max(1, _NUMBERS_AT_ONCE // max(1, array[:1].size))
            for first in range(0, array.shape[0], at_once):  # no copy of all is made
                some = array[first : first + at_once]
                digest.update(np.ascontiguousarray(some, dtype).data)
        return digest.hexdigest()

    @cached_property
    def sha256(self) -> str:
        edges = self.sources(), self.weights_of(slice(None))
        return digest_of(self.class_names, self.indptr, [edges], self.labels, self.split)


def are_labelled(labels: np.ndarray) -> np.ndarray:
    """Return of which nodes something is known, (n,) bool, from labels as `Graph` has them."""
    return labels != NO_CLASS if labels.ndim == 1 else (labels != UNKNOWN).any(axis=1)


def digest_of(
    class_names: Sequence[str],
    indptr: np.ndarray,
    edges: Iterable[tuple[np.ndarray, np.ndarray | None]],
    labels: np.ndarray,
    split: np.ndarray,
) -> str:
    """Return the SHA-256 of a graph but its features.

    Sources, int64, and weights of edges, float32, may come in pieces.
    """
    digest, of_weights = hashlib.sha256("\0".join(class_names).encode()), hashlib.sha256()
    digest.update(np.ascontiguousarray(indptr).data)
    has_weights = False
    for sources, weights in edges:
        digest.update(np.ascontiguousarray(sources).data)
        if weights is not None:
            of_weights.update(np.ascontiguousarray(weights).data)
            has_weights = True
    for array in (labels, split):
        digest.update(np.ascontiguousarray(array).data)
    if has_weights:
        digest.update(of_weights.digest())
    return digest.hexdigest()


def edges_into(indptr: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the edges of each node begin, (m + 1,) int64, and their numbers, (e,) int64."""
    starts = indptr[nodes]
    degrees = indptr[nodes + 1] - starts
    rows = np.append(0, np.cumsum(degrees))
    return rows, np.arange(rows[-1]) + np.repeat(starts - rows[:-1], degrees)


def are_rows(indptr: np.ndarray, last: int) -> bool:
    """Whether these can be the beginnings of compressed rows: ascending from 0 to `last`."""
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != last:
        return False
    return bool((indptr[1:] >= indptr[:-1]).all())


def rows_of_kept(rows: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    """Return where compressed rows begin, (m + 1,) int64, if (e,) elements are kept or left out."""
    num_before = np.zeros(len(is_kept) + 1, dtype=np.int64)
    np.cumsum(is_kept, out=num_before[1:])  # no second array of all edges
    return num_before[rows]


def sort_rows(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of compressed rows, ascending in each row, and where they were."""
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    order = np.lexsort((indices, rows))
    return indices[order], order


def in_rows(
    sources: np.ndarray,
    targets: np.ndarray,
    num_nodes: int,
    weights: np.ndarray | None = None,
    *,
    both_ways: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Sort edges by their targets, then by their sources; return a Graph's rows, and the weights.

    The ends are (e,) integers from 0 to n - 1. An edge that is there more than once gets the sum of
    its weights. `both_ways` adds the reverse of every edge, which a graph with weights cannot have.
    Without weights, this holds two int64 arrays of the edges at a time besides its arguments.
    """
    num_edges = len(sources)
    keys = np.empty((1 + both_ways) * num_edges, dtype=np.int64)
    np.multiply(targets, num_nodes, out=keys[:num_edges], dtype=np.int64)
    keys[:num_edges] += sources
    if both_ways:
        np.multiply(sources, num_nodes, out=keys[num_edges:], dtype=np.int64)
        keys[num_edges:] += targets
    if weights is None:
        keys.sort()  # np.unique hashes integers since NumPy 2.3, which took 60 times as long
    else:
        order = np.argsort(keys, kind="stable")
        keys, weights = keys[order], weights[order]
    is_first = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    if weights is not None and not is_first.all():
        sums = np.add.reduceat(weights, np.flatnonzero(is_first), dtype=np.float64)
        weights = sums.astype(np.float32)
    keys = keys[is_first]
    indptr = np.searchsorted(keys, np.arange(num_nodes + 1) * num_nodes)
    return indptr, np.remainder(keys, max(1, num_nodes), out=keys), weights


def random_walks(
    indptr: np.ndarray,
    indices: np.ndarray | StoredRows,
    roots: np.ndarray,
    num_steps: int,
    draws: np.random.Generator,
) -> np.ndarray:
    """Return the nodes of random walks from some roots, (num_steps + 1, m), of the roots' type.

    A step follows an edge backwards, to its source; a walk stays on a node that no edge ends in.
    """
    walks = np.empty((num_steps + 1, len(roots)), dtype=roots.dtype)
    walks[0] = roots
    for step in range(num_steps):
        nodes = walks[step]
        starts = indptr[nodes]
        degrees = indptr[nodes + 1] - starts
        offsets = (draws.random(len(nodes)) * degrees).astype(np.int64)
        goes_on = degrees > 0
        walks[step + 1] = nodes
        walks[step + 1, goes_on] = indices[(starts + offsets)[goes_on]]
    return walks


def symmetric(graph: Graph) -> Graph:
    """Return the graph with every edge in both directions; a reverse weighs as much as its edge."""
    sources = graph.sources()
    if is_symmetric(torch.from_numpy(graph.indptr), torch.from_numpy(sources)):
        return graph
    targets, weights = graph.targets(), graph.weights_of(slice(None))
    if weights is None:
        indptr, indices, _ = in_rows(sources, targets, graph.num_nodes, both_ways=True)
        return replace(graph, indptr=indptr, indices=indices)
    there = targets * graph.num_nodes + sources  # ascending
    wanted = sources * graph.num_nodes + targets
    places = np.minimum(np.searchsorted(there, wanted), len(there) - 1)
    lacks = there[places] != wanted
    indptr, indices, weights = in_rows(
        np.concatenate((sources, targets[lacks])),
        np.concatenate((targets, sources[lacks])),
        graph.num_nodes,
        np.concatenate((weights, weights[lacks])),
    )
    return replace(graph, indptr=indptr, indices=indices, edge_weights=weights)


def neighbours(graph: Graph) -> csr_array:
    """Return which nodes have an edge between them, but loops: (n, n) bool, columns ascending."""
    sources, targets = graph.sources(), graph.targets()
    is_other = targets != sources
    ends = targets[is_other], sources[is_other]
    shape = graph.num_nodes, graph.num_nodes
    edges = coo_array((np.ones(len(ends[0]), dtype=bool), ends), shape).tocsr()
    both = csr_array(edges + edges.T)
    both.sort_indices()
    return both
