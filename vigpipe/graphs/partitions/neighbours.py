"""The neighbours of every node, which all methods but the random one need."""

import numpy as np
from scipy.sparse import coo_array, csr_array

from vigpipe.graphs.graph import Graph


def neighbours(graph: Graph) -> csr_array:
    """Return which nodes have an edge between them, in either direction, without self-loops.

    The matrix is (n, n) bool, symmetric, with ascending columns in each row.
    """
    sources, targets = graph.sources(), graph.targets()
    is_other = targets != sources
    ends = targets[is_other], sources[is_other]
    shape = graph.num_nodes, graph.num_nodes
    edges = coo_array((np.ones(len(ends[0]), dtype=bool), ends), shape).tocsr()
    both = csr_array(edges + edges.T)
    both.sort_indices()
    return both
