"""METIS: parts of nearly equal size with few edges between them."""

import numpy as np
import pymetis
from scipy.sparse import csr_array


def metis_parts(joined: csr_array, num_parts: int, draws: np.random.Generator) -> np.ndarray:
    """Cut as few edges as METIS finds: it coarsens the graph, cuts that, and refines the cut.

    Karypis and Kumar 1998, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular
    Graphs" (SIAM J. Sci. Comput. 20). The largest part has about 1.03 times the mean number of
    nodes, more where a part has a few dozen only; one may be empty if there are hardly more nodes
    than parts. METIS draws with the C library's rand(), so another operating system may get other
    parts.
    """
    starts = np.asarray(joined.indptr, dtype=np.int64)
    adjacency = pymetis.CSRAdjacency(starts, np.asarray(joined.indices, dtype=np.int64))
    # The seed is 2 or more, because 0 and 1 are the same to glibc's srand.
    options = pymetis.Options(seed=int(draws.integers(2, 1 << 31)))
    # Cutting into k parts at once mostly keeps more edges than bisecting again and again, but for
    # one seed in ten it keeps far fewer where there are many components, as in CiteSeer.
    cuts = [
        pymetis.part_graph(num_parts, adjacency, options=options, recursive=bisects)
        for bisects in (False, True)
    ]
    best = min(cuts, key=lambda cut: cut.edge_cuts)
    return np.array(best.vertex_part, dtype=np.int64)
