"""Spectral clustering: clusters of the leading eigenvectors of a dense adjacency matrix."""

import numpy as np
from scipy.linalg import eigh
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.graphs.partitions.clusters import clusters

# A dense matrix of float32 then has 100 MB, and its eigenvectors take 10 s.
MOST_NODES = 5000


def spectral_parts(joined: csr_array, num_parts: int, draws: np.random.Generator) -> np.ndarray:
    """Cluster the nodes by the k leading eigenvectors of D'^-1/2 A D'^-1/2.

    D' is the degrees plus their mean, so that the eigenvectors are not those of small components:
    regularized spectral clustering, Qin and Rohe 2013 (arXiv:1309.4111). Each node has a neighbour,
    and k is at most n. A part may be empty, and parts may differ much in size. InputError if the
    graph is too large for a dense matrix.
    """
    degrees = np.diff(joined.indptr)
    num_nodes = len(degrees)
    if num_nodes > MOST_NODES:
        raise InputError(
            f"spectral parts: take a dense matrix, so at most {MOST_NODES:,} nodes may have "
            f"neighbours, but {num_nodes:,} have; choose metis or walks"
        )
    scale = 1 / np.sqrt(degrees + degrees.mean())
    matrix = joined.toarray() * np.outer(scale, scale).astype(np.float32)
    leading = num_nodes - num_parts, num_nodes - 1  # eigh counts from the smallest
    _, vectors = eigh(matrix, subset_by_index=leading, overwrite_a=True)
    return clusters(vectors, num_parts, draws)  # pyrefly: ignore[bad-argument-type]
