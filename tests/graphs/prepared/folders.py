"""Prepared folders of small graphs."""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from vigpipe.graphs.graph import in_rows
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.prepared.write import write_folder
from vigpipe.graphs.sbm import draw

DENSE = draw("sbm:300,4,5,6", seed=2)


def other_graph():
    """Draw a directed graph with loops, weights, sparse features, several classes, and names."""
    draws = np.random.default_rng(5)
    sources, targets = draws.integers(300, size=(2, 900))
    targets[:40] = sources[:40]
    weights = draws.uniform(0.1, 2, 900).astype(np.float32)
    indptr, indices, weights = in_rows(sources, targets, 300, weights)
    features = draws.random((300, 90), np.float32) * (draws.random((300, 90)) < 0.05)
    labels = (draws.random((300, 4)) < 0.5).astype(np.int8)
    names = tuple(f"näme {i}" for i in range(300))
    changes: dict[str, Any] = {"labels": labels, "node_names": names, "edge_weights": weights}
    edges = {"indptr": indptr, "indices": indices}
    return replace(DENSE, **edges, **changes, features=csr_array(features))


OTHER = other_graph()


def write(folder, graph=DENSE, *, method: Any = "metis", parts=6, seed=0, symmetric=True):
    """Write a folder, and return its manifest."""
    partition = make_partition(graph, method, parts, seed)
    return write_folder(folder, graph, partition, scaling="raw", symmetric=symmetric, seed=seed)
