"""A graph in one .npz file of NumPy, as `vigpipe dataset` writes it and anybody can."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.npy import names_in, read_npz
from vigpipe.graphs.choices import COLUMNS, Choices
from vigpipe.graphs.formats.checked import make_graph, make_rows
from vigpipe.graphs.graph import NO_SPLIT, Graph

EDGES, MASKS = ("edge_src", "edge_dst"), ("train_mask", "val_mask", "test_mask")
_ROWS = ("x_indptr", "x_indices")
_FACTS = ("x_data", "x_shape", "num_features", "classes", "names", COLUMNS)
KNOWN = (*EDGES, "edge_index", "edge_weight", "x", *_ROWS, "y", "split", *MASKS, *_FACTS)
_OF_EDGES = ("edge_attr", "edge_type", "edge_time", "edge_feat")  # or plural


def read(path: Path, *, multi_label: bool = False, trains: bool = True) -> Graph:
    """Read a graph file (docs/graph-data.md); InputError if it holds no graph to train on.

    With `multi_label`, labels that are zeros and ones stay so even if each node has one class. A
    graph that is not trained on may lack labels and split.
    """
    arrays = read_arrays(path, trains=trains)
    return graph_of(arrays, str(path), multi_label=multi_label, trains=trains)


def read_arrays(path: Path, *, trains: bool) -> dict[str, np.ndarray]:
    """Read the arrays of a graph file; InputError if one is missing, or there is another."""
    names = names_in(path)
    _check_known(names, path)
    required = ("edge_index",) if "edge_index" in names else EDGES
    if trains and "y" in names and not {"split", *MASKS} & set(names):
        raise InputError(
            f"{path}: has no split; vigpipe dataset import --data {path} --test 0.2 OUT.npz draws "
            "one"
        )
    if trains:
        required = (*required, "y")
    return read_npz(path, required, [n for n in KNOWN if n not in required], mapped=("x",))


def graph_of(
    arrays: Mapping[str, np.ndarray], where: str, *, multi_label: bool = False, trains: bool = True
) -> Graph:
    """Make a graph of arrays that are named as in a graph file; an InputError begins with `where`.

    What torch-geometric calls edge_index and masks is understood, too.
    """
    arrays = in_our_names(arrays, where)
    labels = arrays.get("y")
    of_nodes = next((arrays[name] for name in ("y", "x", "x_indptr") if name in arrays), None)
    num_nodes = 0
    if of_nodes is not None and of_nodes.ndim:
        num_nodes = len(of_nodes) - (of_nodes is arrays.get("x_indptr"))
    graph = make_graph(
        name=where,
        where=where,
        edges=(arrays["edge_src"], arrays["edge_dst"]),
        features=_features(arrays, num_nodes, where),
        labels=labels,
        split=arrays.get("split"),
        class_names=_texts(arrays, "classes", "each class", None, where),
        multi_label=multi_label,
        edge_weights=arrays.get("edge_weight"),
        trains=trains,
    )
    of_nodes = f"each of the {num_nodes} nodes"
    names = _texts(arrays, "names", of_nodes, num_nodes, where)
    columns = _texts(arrays, COLUMNS, "the graph", 1, where)
    choices = None if columns is None else Choices.parse(columns[0], where)
    if choices is not None and choices.width != graph.num_features:
        raise InputError(
            f"{where}: its {COLUMNS} make {choices.width} features, but it has "
            f"{graph.num_features}; import it again"
        )
    return replace(graph, node_names=names, choices=choices)


def in_our_names(arrays: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Turn edge_index and masks into ends of edges and a split."""
    named = dict(arrays)
    if "edge_index" in named:
        edges = named.pop("edge_index")
        if edges.ndim != 2 or len(edges) != 2 or set(EDGES) & set(named):
            raise InputError(
                f"{where}: edge_index has the shape {edges.shape}, expected (2, e), and no "
                "edge_src and edge_dst beside it; save one of the two"
            )
        named |= dict(zip(EDGES, edges, strict=True))
    masks = [(name, part) for part, name in enumerate(MASKS) if name in named]
    if not masks:
        return named
    given = [named.pop(name) for name, _ in masks]
    shapes = {mask.shape for mask in given}
    if "split" in named or len(shapes) > 1 or any(m.ndim != 1 or m.dtype != bool for m in given):
        raise InputError(
            f"{where}: {', '.join(name for name, _ in masks)} have the shapes "
            f"{', '.join(map(str, shapes))}, expected true or false for each node, of shape (n,), "
            "and no split beside them; save one column of each, or split alone"
        )
    if (np.sum(given, axis=0) > 1).any():
        node = int((np.sum(given, axis=0) > 1).argmax())
        raise InputError(
            f"{where}: node {node} is in several of {', '.join(name for name, _ in masks)}; let "
            "each be in one"
        )
    named["split"] = np.select(given, [part for _, part in masks], NO_SPLIT).astype(np.int8)
    return named


def _check_known(names: Sequence[str], path: Path) -> None:
    """Raise InputError for arrays that nobody would read, with what to do about the usual ones."""
    unknown = [name for name in names if name not in KNOWN]
    of_edges = [name for name in unknown if name.removesuffix("s") in _OF_EDGES]
    if of_edges:
        raise InputError(
            f"{path}: has {', '.join(of_edges)}, but edges have no types or features here; save "
            "one weight above 0 for each as edge_weight, or leave the array out"
        )
    if unknown:
        raise InputError(
            f"{path}: has {escaped(', '.join(unknown))}, expected none but {', '.join(KNOWN)}; "
            "rename what was meant, and leave other arrays out"
        )


def _features(
    arrays: Mapping[str, np.ndarray], num_nodes: int, where: str
) -> np.ndarray | csr_array:
    is_sparse = [name in arrays for name in _ROWS]
    if ("x" in arrays) == any(is_sparse) or any(is_sparse) != all(is_sparse):
        there = ", ".join(name for name in ("x", *_ROWS) if name in arrays) or "none of them"
        raise InputError(
            f"{where}: of the arrays x, x_indptr and x_indices it has {there}; save dense features "
            "as x, or sparse ones as x_indptr and x_indices"
        )
    stated = _stated_shape(arrays, where)
    if "x" in arrays:
        _check_stated(stated, arrays["x"].shape, where)
        return arrays["x"]
    indptr, indices = (arrays[name] for name in _ROWS)
    num_columns = stated.get("num_features", stated.get("x_shape", (0,)))[-1]
    if not stated:
        are_whole = indices.size and indices.dtype.kind in "iu"
        num_columns = int(indices.max()) + 1 if are_whole else 1
    _check_stated(stated, (num_nodes, num_columns), where)
    return make_rows(indptr, indices, arrays.get("x_data"), (num_nodes, num_columns), where)


def _stated_shape(arrays: Mapping[str, np.ndarray], where: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of `x_shape`, nodes and features, and of `num_features`, if there."""
    stated: dict[str, tuple[int, ...]] = {}
    for name, size in (("x_shape", 2), ("num_features", 1)):
        if name in arrays:
            stored = arrays[name]
            if stored.dtype.kind not in "iu" or stored.size != size:
                raise InputError(
                    f"{where}: {name} has {stored.dtype} of shape {stored.shape}, expected {size} "
                    "whole number(s); save the shape of the features"
                )
            stated[name] = tuple(stored.reshape(-1).tolist())
    return stated


def _check_stated(
    stated: Mapping[str, tuple[int, ...]], shape: tuple[int, ...], where: str
) -> None:
    for name, numbers in stated.items():
        expected = shape[-len(numbers) :]
        if numbers != expected:
            raise InputError(
                f"{where}: {name} is {' × '.join(map(str, numbers))}, but by its other arrays it "
                f"would be {' × '.join(map(str, expected))}; correct it, or leave it out"
            )


def _texts(
    arrays: Mapping[str, np.ndarray], name: str, of: str, number: int | None, where: str
) -> tuple[str, ...] | None:
    """Return the texts of an array, if it is there: one for each `of`, so many if that is known."""
    texts = arrays.get(name)
    if texts is None:
        return None
    if texts.dtype.kind != "U" or texts.ndim != 1 or number not in (None, len(texts)):
        raise InputError(
            f"{where}: {name} has {texts.dtype} of shape {texts.shape}, expected one text for "
            f"{of}; save np.array({name}, dtype=str)"
        )
    return tuple(texts.tolist())
