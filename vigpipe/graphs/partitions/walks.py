"""Clusters of nodes that meet on random walks."""

import numpy as np
from scipy.sparse import coo_array, csr_array
from sklearn.utils.extmath import randomized_svd

from vigpipe.graphs.graph import random_walks
from vigpipe.graphs.partitions.clusters import clusters

NODES_PER_WALK = 10
WALKS_PER_NODE = 4
WINDOW = 5  # nodes at most this many steps apart on a walk have met
DIMENSIONS = 128


def walk_parts(joined: csr_array, num_parts: int, draws: np.random.Generator) -> np.ndarray:
    """Embed the nodes by how often they meet on random walks, then run k-means.

    Walks: DeepWalk, Perozzi et al. 2014 (arXiv:1403.6652). Embedding: DeepWalk factorises the
    logarithm of how much more often two nodes meet than by chance, Qiu et al. 2018
    (arXiv:1710.02971); as there, values below 0 are 0, and the embedding is U √Σ of the truncated
    singular value decomposition. Each node has a neighbour, and k is at most n. A part may be
    empty, and parts may differ much in size.
    """
    num_nodes = len(joined.indptr) - 1
    roots = np.tile(np.arange(num_nodes, dtype=joined.indices.dtype), WALKS_PER_NODE)
    walks = random_walks(joined.indptr, joined.indices, roots, NODES_PER_WALK - 1, draws)
    information = _information(_meetings(walks, num_nodes))
    left, values, _ = randomized_svd(
        information,
        min(DIMENSIONS, num_nodes),
        n_iter=4,  # takes more than its default's type
        random_state=int(draws.integers(1 << 31)),
    )
    return clusters(left * np.sqrt(values), num_parts, draws)


def _meetings(walks: np.ndarray, num_nodes: int) -> csr_array:
    """Count how often two nodes are within WINDOW steps of one another, (n, n) symmetric."""
    counts = csr_array((num_nodes, num_nodes), dtype=np.float32)
    for apart in range(1, WINDOW + 1):
        ends = walks[:-apart].ravel(), walks[apart:].ravel()
        ones = np.ones(len(ends[0]), dtype=np.float32)
        counts = counts + coo_array((ones, ends), counts.shape).tocsr()
    return csr_array(counts + counts.T)


def _information(counts: csr_array) -> csr_array:
    """Return log(count × all / (count of row × count of column)), or 0 where that is negative."""
    of_node = counts.sum(axis=1, dtype=np.float64)
    of_row = np.repeat(of_node, np.diff(counts.indptr))
    ratio = counts.data * of_node.sum() / (of_row * of_node[counts.indices])
    data = np.log(np.maximum(ratio, 1)).astype(np.float32)
    information = csr_array((data, counts.indices, counts.indptr), counts.shape)
    information.eliminate_zeros()
    return information
