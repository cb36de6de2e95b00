"""Keep partitions in files between runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from vigpipe.graphs.graph import Graph
from vigpipe.graphs.kept import Form, keep, read_kept
from vigpipe.graphs.partitions.make import check_request, make_partition
from vigpipe.graphs.partitions.partition import Method, Partition, measured

_VERSION = 1  # raise it when a method begins to make other parts for the same seed


def cached_partition(
    graph: Graph, method: Method, num_parts: int, seed: int, beside: Path | None
) -> Partition:
    """Read a partition from a file, or make it and write the file; for `beside` see `read_kept`."""
    if method == "random":  # quicker made than read
        return make_partition(graph, method, num_parts, seed)
    check_request(graph, method, num_parts, seed)
    name = f"{method}-{num_parts}-{seed}-{graph.sha256}-{_VERSION}"
    form = Form(
        f"{num_parts} parts of {graph.num_nodes} nodes",
        {"parts": (np.int64, (graph.num_nodes,))},
        lambda arrays: _are_parts(arrays["parts"], num_parts),
    )
    found = read_kept(name, beside, form)
    if found is not None:
        arrays, seconds, read_seconds = found
        partition = measured(graph, method, arrays["parts"], num_parts, seconds)
        return replace(partition, was_read=True, read_seconds=read_seconds)
    partition = make_partition(graph, method, num_parts, seed)
    read_seconds = keep(name, beside, form, {"parts": partition.parts}, partition.seconds)
    return replace(partition, read_seconds=read_seconds)


def _are_parts(parts: np.ndarray, num_parts: int) -> bool:
    are_in_range = parts.min() >= 0 and parts.max() < num_parts
    return bool(are_in_range and np.bincount(parts, minlength=num_parts).all())
