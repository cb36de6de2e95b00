"""A graph in one .npz file of NumPy, as `vigpipe dataset` writes it and anybody can."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.npy import read_npz
from vigpipe.graphs.formats.checked import make_graph, make_rows
from vigpipe.graphs.graph import Graph

_REQUIRED = ("edge_src", "edge_dst", "y", "split")
_ROWS = ("x_indptr", "x_indices")
_OPTIONAL = ("x", *_ROWS, "x_data", "x_shape", "num_features", "classes", "names")


def read(path: Path) -> Graph:
    """Read a graph file (docs/graph-data.md); InputError if it holds no graph to train on."""
    arrays = read_npz(path, _REQUIRED, _OPTIONAL, mapped=("x",))
    labels = arrays["y"]
    num_nodes = len(labels) if labels.ndim else 0
    graph = make_graph(
        name=str(path),
        where=str(path),
        edges=(arrays["edge_src"], arrays["edge_dst"]),
        features=_features(arrays, num_nodes, path),
        labels=labels,
        split=arrays["split"],
        class_names=_texts(arrays, "classes", "each class", None, path),
    )
    of_nodes = f"each of the {num_nodes} nodes"
    return replace(graph, node_names=_texts(arrays, "names", of_nodes, num_nodes, path))


def _features(arrays: dict[str, np.ndarray], num_nodes: int, path: Path) -> np.ndarray | csr_array:
    is_sparse = [name in arrays for name in _ROWS]
    if ("x" in arrays) == any(is_sparse) or any(is_sparse) != all(is_sparse):
        there = ", ".join(name for name in ("x", *_ROWS) if name in arrays) or "none of them"
        raise InputError(
            f"{path}: of the arrays x, x_indptr and x_indices it has {there}; save dense features "
            "as x, or sparse ones as x_indptr and x_indices"
        )
    if "x" in arrays:
        return arrays["x"]
    indptr, indices = (arrays[name] for name in _ROWS)
    shape = num_nodes, _num_columns(arrays, indices, path)
    return make_rows(indptr, indices, arrays.get("x_data"), shape, str(path))


def _num_columns(arrays: dict[str, np.ndarray], indices: np.ndarray, path: Path) -> int:
    """Return what `x_shape` or `num_features` says, otherwise the largest index + 1."""
    for name, size in (("x_shape", 2), ("num_features", 1)):
        if name in arrays:
            stored = arrays[name]
            if stored.dtype.kind not in "iu" or stored.size != size:
                raise InputError(
                    f"{path}: {name} has {stored.dtype} of shape {stored.shape}, expected {size} "
                    "whole number(s); save the shape of the features"
                )
            return int(stored.reshape(-1)[-1])
    return int(indices.max()) + 1 if indices.size and indices.dtype.kind in "iu" else 1


def _texts(
    arrays: dict[str, np.ndarray], name: str, of: str, number: int | None, path: Path
) -> tuple[str, ...] | None:
    """Return the texts of an array, if it is there: one for each `of`, so many if that is known."""
    texts = arrays.get(name)
    if texts is None:
        return None
    if texts.dtype.kind != "U" or texts.ndim != 1 or number not in (None, len(texts)):
        raise InputError(
            f"{path}: {name} has {texts.dtype} of shape {texts.shape}, expected one text for "
            f"{of}; save np.array({name}, dtype=str)"
        )
    return tuple(texts.tolist())
