"""Make a graph of parts that a stranger has written, or say in one sentence why that cannot be."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.names import check_class_names, first_few
from vigpipe.graphs.formats.labels import check_trainable, read_labels, whole_numbers
from vigpipe.graphs.graph import (
    NO_SPLIT,
    TEST,
    TRAIN,
    UNKNOWN,
    Graph,
    are_labelled,
    are_rows,
    in_rows,
)

MOST_FEATURES = 1 << 24  # the first layer has a row of weights for each feature
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30  # of an edge: float32 can hold sums and what divides them
_AT_ONCE = 1 << 22  # numbers that are checked together


def make_graph(
    *,
    name: str,
    where: str,
    edges: tuple[np.ndarray, np.ndarray],
    features: np.ndarray | csr_array,
    labels: np.ndarray | None,
    split: np.ndarray | None,
    class_names: Sequence[str] | None = None,
    multi_label: bool = True,
    edge_weights: np.ndarray | None = None,
    trains: bool = True,
) -> Graph:
    """Check the parts of a graph and put them together; an InputError begins with `where`.

    Edges are their sources, and their targets, (e,) integers each; repeated ones count once, or
    their weights, (e,) numbers above 0, are added. Features, (n, d), are dense or from `make_rows`.
    Labels, class names and `multi_label` are those of `read_labels`. The split is (n,) whole
    numbers; a node without a class gets NO_SPLIT, because there is nothing to train or to score it
    with. A graph that is not trained on may lack labels, of which it then has no class, and the
    split: all nodes with a class are of the test.
    """
    shape: Any = features.shape  # scipy says it can be None
    lengths = {"features": shape[0] if shape else 0}
    lengths |= {
        what: len(np.atleast_1d(array))
        for what, array in (("labels", labels), ("split", split))
        if array is not None
    }
    num_nodes = lengths.get("labels", lengths["features"])
    if num_nodes < 1:
        raise InputError(f"{where}: has no nodes, expected at least one; it may be the wrong file")
    for what, length in lengths.items():
        if length != num_nodes:
            of = "features" if labels is None else "labels"
            raise InputError(
                f"{where}: has {of} of {num_nodes} nodes, but {what} of {length}; save all arrays "
                "in the same order of nodes"
            )
    edges = _check_edges(*edges, num_nodes, where)
    if edge_weights is not None:
        edge_weights = check_weights(edge_weights, len(edges[0]), where)
    features = check_features(features, where)
    parts = None if split is None else _check_split(split, where)
    if labels is None:
        check_class_names(names := tuple(class_names or ()), where)
        shape = (num_nodes, len(names)) if multi_label else (num_nodes,)
        of_nodes, notes = np.full(shape, UNKNOWN, np.int8 if multi_label else np.int64), ()
    else:
        of_nodes, names, notes = read_labels(
            labels, parts, class_names, where, multi_label=multi_label, trains=trains
        )
    split = np.full(num_nodes, TEST, np.int8) if parts is None else parts
    if trains or parts is None:
        split = np.where(are_labelled(of_nodes), split, np.int8(NO_SPLIT))
    if trains:
        check_trainable(of_nodes, split, names, where)
        notes = (*notes, *_unlearned(of_nodes[split == TRAIN], names, where))
    indptr, indices, weights = in_rows(*edges, num_nodes, edge_weights)
    if weights is not None and (weights > MOST_WEIGHT).any():
        raise InputError(
            f"{where}: the weights of repeated edges add up to more than {MOST_WEIGHT:g}; divide "
            "all of them by a number"
        )
    return Graph(
        name,
        indptr,
        indices,
        features,
        of_nodes,
        split,
        names,
        edge_weights=weights,
        notes=notes,
    )


def _unlearned(of_training: np.ndarray, names: Sequence[str], where: str) -> list[str]:
    """Say of which classes, of several, nothing is known of any training node."""
    if of_training.ndim == 1:
        return []
    numbers = np.flatnonzero((of_training == UNKNOWN).all(axis=0)).tolist()
    unknown = [names[number] for number in numbers]
    of = f"{where}: of no training node is it known whether it has {first_few(unknown)}"
    return [f"{of}, so what is predicted of that means nothing"] * bool(unknown)


def make_split(parts: Iterable[tuple[int, np.ndarray | None, str]], num_nodes: int) -> np.ndarray:
    """Make the split, (n,) int8, of lists of nodes; NO_SPLIT for nodes in no list.

    Each part is TRAIN, VALIDATION or TEST, with its nodes and the words that an error begins with.
    InputError if a list is missing, has other nodes than 0 to n - 1, or nodes of another list.
    """
    split = np.full(num_nodes, NO_SPLIT, np.int8)
    for part, nodes, where in parts:
        if nodes is None or nodes.min() < 0 or nodes.max() >= num_nodes:
            raise InputError(
                f"{where} is no list of numbers of nodes from 0 to {num_nodes - 1}; fetch it again"
            )
        if (split[nodes] != NO_SPLIT).any():
            raise InputError(f"{where} has nodes of another part of the split; fetch it again")
        split[nodes] = part
    return split


def make_rows(
    indptr: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray | None,
    shape: tuple[int, int],
    where: str,
) -> csr_array:
    """Make sparse features, (n, d), of compressed rows (CSR); InputError if they are none.

    The arrays are integers, (n + 1,) and (m,), and numbers, (m,), or None for ones. Numbers in the
    same row and column are added up. Messages begin with `where`.
    """
    num_rows, num_columns = shape
    if not 1 <= num_columns <= MOST_FEATURES:
        raise InputError(
            f"{where}: has {num_columns} features of a node, expected 1 … {MOST_FEATURES}; leave "
            "out those that are always 0"
        )
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
        raise InputError(
            f"{where}: x_indptr and x_indices have {indptr.dtype} and {indices.dtype}, expected "
            "whole numbers; save a scipy csr_array's indptr and indices"
        )
    if indptr.shape != (num_rows + 1,) or indices.ndim != 1:
        raise InputError(
            f"{where}: x_indptr has the shape {indptr.shape} and x_indices {indices.shape}, "
            f"expected ({num_rows + 1},) and one dimension; save a scipy csr_array of a row for "
            "each node"
        )
    if not are_rows(indptr, len(indices)):
        raise InputError(
            f"{where}: x_indptr does not ascend from 0 to {len(indices)}, the number of x_indices; "
            "save a scipy csr_array's own indptr"
        )
    if len(indices) and (indices.min() < 0 or indices.max() >= num_columns):
        raise InputError(
            f"{where}: x_indices lie in {indices.min()} … {indices.max()}, but with {num_columns} "
            f"features they belong in 0 … {num_columns - 1}; correct them or the number of features"
        )
    if values is None:
        values = np.ones(len(indices), np.float32)
    if values.shape != indices.shape or values.dtype.kind not in "biuf":
        raise InputError(
            f"{where}: x_data has {values.dtype} of shape {values.shape}, expected a number for "
            f"each of the {len(indices)} x_indices; save a scipy csr_array's own data"
        )
    # The checks above leave only numbers that fit into int64; scipy takes int32 where it can.
    rows = csr_array(
        (_as_float32(values), indices.astype(np.int64), indptr.astype(np.int64)), shape=shape
    )
    rows.sum_duplicates()
    rows.eliminate_zeros()
    return rows


def _as_float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is infinite, and refused
        return np.ascontiguousarray(values, dtype=np.float32)


def _check_edges(
    sources: np.ndarray, targets: np.ndarray, num_nodes: int, where: str
) -> tuple[np.ndarray, np.ndarray]:
    for ends in (sources, targets):
        if ends.ndim != 1 or ends.dtype.kind not in "iu" or ends.shape != sources.shape:
            raise InputError(
                f"{where}: the ends of its edges are {sources.dtype} of shape {sources.shape} and "
                f"{targets.dtype} of shape {targets.shape}, expected whole numbers of the same "
                "shape (e,); save the two ends of every edge"
            )
    wrong = (sources < 0) | (sources >= num_nodes) | (targets < 0) | (targets >= num_nodes)
    if wrong.any():
        edge = int(wrong.argmax())
        raise InputError(
            f"{where}: edge {edge} goes from node {sources[edge]} to node {targets[edge]}, but "
            f"with {num_nodes} nodes they count from 0 to {num_nodes - 1}; correct the edge"
        )
    # NumPy does not calculate with uint64 and int64 together.
    sources, targets = (
        ends.view(np.int64) if ends.dtype == np.uint64 else ends for ends in (sources, targets)
    )
    return sources, targets


def check_weights(weights: np.ndarray, num_edges: int, where: str) -> np.ndarray:
    """Return weights of edges, (e,), as float32; InputError if they are out of range."""
    if weights.shape != (num_edges,) or weights.dtype.kind not in "biuf":
        raise InputError(
            f"{where}: the weights of its edges are {weights.dtype} of shape {weights.shape}, "
            f"expected a number for each of the {num_edges} edges, of shape ({num_edges},)"
        )
    numbers = _as_float32(weights)
    is_wrong = ~((numbers >= LEAST_WEIGHT) & (numbers <= MOST_WEIGHT))  # NaN is wrong too
    if is_wrong.any():
        edge = int(is_wrong.argmax())
        raise InputError(
            f"{where}: edge {edge} has the weight {weights[edge]}, expected {LEAST_WEIGHT:g} … "
            f"{MOST_WEIGHT:g}; leave out edges that count nothing, shift or split weights below 0, "
            "and divide all of them by a number if they are too large or too small"
        )
    return numbers


def check_features(
    features: np.ndarray | csr_array, where: str, numbers: np.ndarray | None = None
) -> np.ndarray | csr_array:
    """Return features, (n, d), as float32; InputError if they are no finite numbers.

    It begins with `where`, and calls the nodes by their `numbers`, (n,), if there are some.
    """
    shape: Any = features.shape
    if len(shape) != 2 or features.dtype.kind not in "biuf" or shape[1] < 1:
        raise InputError(
            f"{where}: its features are {features.dtype} of shape {shape}, expected "
            "numbers of shape (n, d) with d of at least 1"
        )
    if isinstance(features, csr_array):
        finite = np.isfinite(features.data)
        if not finite.all():
            number = int(finite.argmin())
            node = int(np.searchsorted(features.indptr, number, side="right")) - 1
            _refuse_number(where, node, int(features.indices[number]), numbers)
        return features
    features = _as_float32(features)
    rows = max(1, _AT_ONCE // shape[1])
    for first in range(0, len(features), rows):  # mapped features may be larger than memory
        finite = np.isfinite(features[first : first + rows])
        if not finite.all():
            node, column = np.unravel_index(finite.argmin(), finite.shape)
            _refuse_number(where, first + int(node), int(column), numbers)
    return features


def _refuse_number(where: str, node: int, column: int, numbers: np.ndarray | None) -> None:
    called = node if numbers is None else numbers[node]
    raise InputError(
        f"{where}: feature {column} of node {called} is not a finite number of float32; mend or "
        "remove it"
    )


def _check_split(split: np.ndarray, where: str) -> np.ndarray:
    parts = whole_numbers(split) if split.ndim == 1 else None
    if parts is None:
        raise InputError(
            f"{where}: its split is {split.dtype} of shape {split.shape}, expected whole numbers "
            "of shape (n,): 0 for training, 1 for validation, 2 for test and -1 for none; save "
            "them so"
        )
    wrong = (parts < NO_SPLIT) | (parts > TEST)
    if wrong.any():
        node = int(wrong.argmax())
        raise InputError(
            f"{where}: the split of node {node} is {parts[node]}, expected 0 for training, 1 for "
            "validation, 2 for test or -1 for none; correct it"
        )
    return parts.astype(np.int8)
