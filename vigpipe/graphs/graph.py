"""One large graph in memory: its edges, and what its nodes carry."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.sparse import csr_array

NO_CLASS = -1  # the label of a node without one
TRAIN, VALIDATION, TEST, NO_SPLIT = 0, 1, 2, -1  # which part of the split a node belongs to
SPLITS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


@dataclass(frozen=True, eq=False)
class Graph:
    """One large graph.

    Attributes:
        name: what the user calls it.
        indptr: (n + 1,) int64; the edges that end in node v have the numbers indptr[v] ...
            indptr[v + 1] - 1.
        indices: (e,) int64, the node that each edge comes from, ascending for each v. An edge may
            be there once only; there may be self-loops.
        features: (n, d) float32, dense or as rows of numbers that are not 0.
        labels: (n,) int64 classes, NO_CLASS for none; or (n, C) bool, where a node may have several
            or no classes.
        split: (n,) int8: TRAIN, VALIDATION, TEST or NO_SPLIT. A node without a class has none.
        class_names: the names of the C classes.
        node_names: the names of the nodes; None if they have none.
    """

    name: str
    indptr: np.ndarray
    indices: np.ndarray
    features: np.ndarray | csr_array
    labels: np.ndarray
    split: np.ndarray
    class_names: tuple[str, ...]
    node_names: tuple[str, ...] | None = None

    @property
    def num_nodes(self) -> int:
        """Number n of nodes."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number e of directed edges."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        """Number d of features of a node."""
        shape: Any = self.features.shape  # scipy says it can be None
        return shape[1]

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return len(self.class_names)

    @property
    def is_multi_label(self) -> bool:
        """Whether a node may have several classes."""
        return self.labels.ndim == 2

    def nodes_of(self, split: int) -> np.ndarray:
        """Return the nodes of TRAIN, VALIDATION or TEST, ascending, int64."""
        return np.flatnonzero(self.split == split)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of edges, labels and split, in hexadecimal digits."""
        digest = hashlib.sha256("\0".join(self.class_names).encode())
        for array in (self.indptr, self.indices, self.labels, self.split):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def in_rows(
    sources: np.ndarray, targets: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sort edges by their targets, then by their sources, each once.

    Args:
        sources: (e,) integers, the nodes that the edges come from.
        targets: (e,) integers, the nodes that they end in.
        num_nodes: n; all of these are from 0 to n - 1.

    Returns:
        `indptr` and `indices` of a Graph.
    """
    keys = targets.astype(np.int64) * num_nodes + sources.astype(np.int64)
    keys.sort()  # np.unique hashes integers since NumPy 2.3, which took 60 times as long
    keys = keys[np.diff(keys, prepend=-1) != 0]
    rows, indices = np.divmod(keys, max(1, num_nodes))
    indptr = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_nodes), out=indptr[1:])
    return indptr, indices


def symmetric(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Return `indptr` and `indices` with every edge in both directions."""
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    sources = graph.indices
    both = np.concatenate((sources, targets)), np.concatenate((targets, sources))
    return in_rows(*both, graph.num_nodes)
