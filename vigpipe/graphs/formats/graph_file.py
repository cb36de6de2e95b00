"""A graph in one .npz file of NumPy, as `vigpipe dataset` writes it and anybody can."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.npy import names_in, read_npz
from vigpipe.graphs.formats.checked import make_graph, make_rows
from vigpipe.graphs.graph import Graph

_EDGES, _OF_TRAINING = ("edge_src", "edge_dst"), ("y", "split")
_ROWS = ("x_indptr", "x_indices")
_FACTS = ("x_data", "x_shape", "num_features", "classes", "names")
_OPTIONAL = ("x", *_ROWS, "edge_weight", *_FACTS)
_KNOWN = (*_EDGES, *_OF_TRAINING, *_OPTIONAL)
_OF_EDGES = ("edge_attr", "edge_type", "edge_time", "edge_feat")  # or plural
_MASKS = ("train_mask", "val_mask", "test_mask")


def read(path: Path, *, multi_label: bool = False, trains: bool = True) -> Graph:
    """Read a graph file (docs/graph-data.md); InputError if it holds no graph to train on.

    With `multi_label`, labels that are zeros and ones stay so even if each node has one class. A
    graph that is not trained on may lack labels and split.
    """
    _check_known(names_in(path), path)
    required = (*_EDGES, *_OF_TRAINING) if trains else _EDGES
    arrays = read_npz(path, required, (*_OPTIONAL, *(() if trains else _OF_TRAINING)), ("x",))
    labels = arrays.get("y")
    of_nodes = next((arrays[name] for name in ("y", "x", "x_indptr") if name in arrays), None)
    num_nodes = 0
    if of_nodes is not None and of_nodes.ndim:
        num_nodes = len(of_nodes) - (of_nodes is arrays.get("x_indptr"))
    graph = make_graph(
        name=str(path),
        where=str(path),
        edges=(arrays["edge_src"], arrays["edge_dst"]),
        features=_features(arrays, num_nodes, path),
        labels=labels,
        split=arrays.get("split"),
        class_names=_texts(arrays, "classes", "each class", None, path),
        multi_label=multi_label,
        edge_weights=arrays.get("edge_weight"),
        trains=trains,
    )
    of_nodes = f"each of the {num_nodes} nodes"
    return replace(graph, node_names=_texts(arrays, "names", of_nodes, num_nodes, path))


def _check_known(names: Sequence[str], path: Path) -> None:
    """Raise InputError for arrays that nobody would read, with what to do about the usual ones."""
    unknown = [name for name in names if name not in _KNOWN]
    masks = [name for name in unknown if name in _MASKS]
    of_edges = [name for name in unknown if name.removesuffix("s") in _OF_EDGES]
    if "edge_index" in unknown:
        raise InputError(
            f"{path}: has edge_index, as torch-geometric names edges, expected edge_src, edge_dst "
            "and split; save np.savez('graph.npz', x=x, y=y, edge_src=edge_index[0], edge_dst="
            "edge_index[1], split=np.select([train_mask, val_mask, test_mask], [0, 1, 2], -1))"
        )
    if masks:
        raise InputError(
            f"{path}: has {', '.join(masks)}, of which nothing would be read; save what they say "
            "in split, 0 for training, 1 for validation, 2 for test and -1 for none, and leave "
            "them out"
        )
    if of_edges:
        raise InputError(
            f"{path}: has {', '.join(of_edges)}, but edges have no types or features here; save "
            "one weight above 0 for each as edge_weight, or leave the array out"
        )
    if unknown:
        raise InputError(
            f"{path}: has {escaped(', '.join(unknown))}, expected none but {', '.join(_KNOWN)}; "
            "rename what was meant, and leave other arrays out"
        )


def _features(arrays: dict[str, np.ndarray], num_nodes: int, path: Path) -> np.ndarray | csr_array:
    is_sparse = [name in arrays for name in _ROWS]
    if ("x" in arrays) == any(is_sparse) or any(is_sparse) != all(is_sparse):
        there = ", ".join(name for name in ("x", *_ROWS) if name in arrays) or "none of them"
        raise InputError(
            f"{path}: of the arrays x, x_indptr and x_indices it has {there}; save dense features "
            "as x, or sparse ones as x_indptr and x_indices"
        )
    stated = _stated_shape(arrays, path)
    if "x" in arrays:
        _check_stated(stated, arrays["x"].shape, path)
        return arrays["x"]
    indptr, indices = (arrays[name] for name in _ROWS)
    num_columns = stated.get("num_features", stated.get("x_shape", (0,)))[-1]
    if not stated:
        are_whole = indices.size and indices.dtype.kind in "iu"
        num_columns = int(indices.max()) + 1 if are_whole else 1
    _check_stated(stated, (num_nodes, num_columns), path)
    return make_rows(indptr, indices, arrays.get("x_data"), (num_nodes, num_columns), str(path))


def _stated_shape(arrays: dict[str, np.ndarray], path: Path) -> dict[str, tuple[int, ...]]:
    """Return the numbers of `x_shape`, nodes and features, and of `num_features`, if there."""
    stated: dict[str, tuple[int, ...]] = {}
    for name, size in (("x_shape", 2), ("num_features", 1)):
        if name in arrays:
            stored = arrays[name]
            if stored.dtype.kind not in "iu" or stored.size != size:
                raise InputError(
                    f"{path}: {name} has {stored.dtype} of shape {stored.shape}, expected {size} "
                    "whole number(s); save the shape of the features"
                )
            stated[name] = tuple(stored.reshape(-1).tolist())
    return stated


def _check_stated(stated: dict[str, tuple[int, ...]], shape: tuple[int, ...], path: Path) -> None:
    for name, numbers in stated.items():
        expected = shape[-len(numbers) :]
        if numbers != expected:
            raise InputError(
                f"{path}: {name} is {' × '.join(map(str, numbers))}, but by its other arrays it "
                f"would be {' × '.join(map(str, expected))}; correct it, or leave it out"
            )


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
