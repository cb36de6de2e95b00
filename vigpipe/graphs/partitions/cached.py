"""Keep partitions in files between runs, since making one can take minutes.

A file is named after method, number of parts, seed and the SHA-256 of the graph. It is beside the
graph, where other users of the graph find it too, or else in the user's cache. What is read is
checked; if anything is wrong with it, the partition is made again, and if none can be written, none
is.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from vigpipe.errors import InputError
from vigpipe.files.cache import cache_folder
from vigpipe.files.untrusted import read_bytes
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.partitions.make import check_request, make_partition
from vigpipe.graphs.partitions.partition import Method, Partition, measured
from vigpipe.messages import tell

_VERSION = 1  # raise it when a method begins to make other parts for the same seed
_MOST_HEADER = 1 << 16  # bytes of a file before its numbers


def cached_partition(
    graph: Graph, method: Method, num_parts: int, seed: int, beside: Path | None
) -> Partition:
    """Read a partition from a file, or make it and write the file.

    Random parts are quicker made than read, and are never kept. Ranks may call this at the same
    time: each then makes the partition, the same one.

    Args:
        graph: the graph.
        method: random, metis, spectral or walks.
        num_parts: number of parts.
        seed: of the method.
        beside: the graph's file or folder; the partition is kept in <beside>.parts/ if that can be
            written. None for the user's cache.

    Raises:
        InputError: as for `make_partition`.
    """
    if method == "random":
        return make_partition(graph, method, num_parts, seed)
    check_request(graph, method, num_parts, seed)
    name = f"{method}-{num_parts}-{seed}-{graph.sha256}-{_VERSION}.safetensors"
    for folder in _folders(beside):
        found = _read(folder / name, graph.num_nodes, num_parts)
        if found is not None:
            parts, seconds = found
            return measured(graph, method, parts, num_parts, seconds, was_read=True)
    partition = make_partition(graph, method, num_parts, seed)
    for folder in _folders(beside):
        with contextlib.suppress(OSError):
            _write(folder / name, partition)
            break
    return partition


def _folders(beside: Path | None) -> Iterator[Path]:
    if beside is not None:
        yield Path(f"{beside.absolute()}.parts")
    with contextlib.suppress(OSError):  # the user has none
        yield cache_folder() / "parts"


def _read(path: Path, num_nodes: int, num_parts: int) -> tuple[np.ndarray, float] | None:
    """Read the part of each node, and how long it took to make them.

    Returns:
        The parts and the seconds; None if the file is not there, or not as it should be.
    """
    try:
        if not path.exists():
            return None
    except OSError:  # a folder that may not be searched
        return None
    try:
        tensors = load(read_bytes(path, 8 * num_nodes + _MOST_HEADER))
        parts, seconds = tensors["parts"], float(tensors["seconds"].item())
    except InputError as error:
        tell(f"{error}; the parts are made again")
        return None
    except Exception as error:  # damaged bytes end in almost any exception of safetensors
        tell(f"{path}: is not a file of parts ({error!r}); they are made again")
        return None
    if not _is_partition(parts, num_nodes, num_parts) or not 0 <= seconds < 1e9:
        tell(f"{path}: does not hold {num_parts} parts of {num_nodes} nodes; they are made again")
        return None
    return parts, seconds


def _is_partition(parts: np.ndarray, num_nodes: int, num_parts: int) -> bool:
    """Whether this is (n,) int64 with each of the numbers 0 to num_parts - 1."""
    if parts.shape != (num_nodes,) or parts.dtype != np.int64:
        return False
    if parts.min() < 0 or parts.max() >= num_parts:
        return False
    return bool(np.bincount(parts, minlength=num_parts).all())


def _write(path: Path, partition: Partition) -> None:
    """Write a file whole or not at all; ranks may do so at the same time.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        tensors = {"parts": partition.parts, "seconds": np.array([partition.seconds])}
        partial.write_bytes(save(tensors))
        partial.replace(path)
