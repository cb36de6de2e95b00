"""The citation graphs Cora, CiteSeer and PubMed, in the files of Planetoid.

Source: Yang, Cohen, Salakhutdinov, Revisiting Semi-Supervised Learning with Graph Embeddings, ICML
2016 (arXiv 1603.08861), https://github.com/kimiyoung/planetoid; read as torch-geometric reads them.
"""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_text
from vigpipe.graphs.formats.checked import make_graph
from vigpipe.graphs.formats.old_pickle import read_pickle
from vigpipe.graphs.graph import NO_SPLIT, TEST, TRAIN, VALIDATION, Graph

NUM_VALIDATION = 500  # the nodes that follow the labelled ones
_MOST_NODES = 1 << 22
_PARTS = ("tx", "allx", "y", "ty", "ally", "graph", "test.index")


def file_names(name: str) -> tuple[str, ...]:
    """Return the names of the files that `read` reads."""
    return tuple(f"ind.{name.lower()}.{part}" for part in _PARTS)


def read(name: str, folder: Path) -> Graph:
    """Read a citation graph in its public split, each edge in both directions as it is stored.

    `test.index` lists the numbers of the test nodes in the order of their rows in tx and ty. A
    number that it skips, as in CiteSeer, is an isolated node without features that is in no part of
    the split. Loops are left out.
    """
    paths = dict(zip(_PARTS, (folder / file for file in file_names(name)), strict=True))
    tx, allx = _rows(paths["tx"]), _rows(paths["allx"])
    y, ty, ally = (_one_hot(paths[part]) for part in ("y", "ty", "ally"))
    test = _numbers(paths["test.index"])
    num_known = allx.shape[0]
    if (
        len(ally) != num_known
        or not len(test) == len(ty) == tx.shape[0]
        or tx.shape[1] != allx.shape[1]
        or not y.shape[1] == ty.shape[1] == ally.shape[1]
        or len(y) + NUM_VALIDATION > num_known
    ):
        raise InputError(
            f"{folder}: its files do not fit together (allx {allx.shape}, ally {ally.shape}, tx "
            f"{tx.shape}, ty {ty.shape}, y {y.shape}, {len(test)} numbers in test.index, "
            f"{NUM_VALIDATION} nodes for validation); fetch all of them again"
        )
    num_nodes = int(test.max()) + 1
    # Numbers that it skips take memory, too, for each of them a row of the features and classes.
    most = min(_MOST_NODES, 2 * (num_known + len(test)))
    if test.min() != num_known or len(np.unique(test)) != len(test) or num_nodes > most:
        raise InputError(
            f"{paths['test.index']}: its numbers lie in {test.min()} … {test.max()}, expected each "
            f"once, from {num_known} to at most {most}; fetch it again"
        )
    # Row i of tx and ty belongs to the i-th number; a number that is absent gets a row of zeros.
    order = np.full(num_nodes - num_known, len(test))
    order[test - num_known] = np.arange(len(test))
    padded: Any = vstack((tx, csr_array((1, tx.shape[1]), dtype=np.float32)), format="csr")
    ty = np.concatenate((ty, np.zeros_like(ty[:1])))[order]
    one_hot = np.concatenate((ally, ty))
    split = np.full(num_nodes, NO_SPLIT)
    split[: len(y)] = TRAIN
    split[len(y) : len(y) + NUM_VALIDATION] = VALIDATION
    split[test] = TEST
    unclear = (split != NO_SPLIT) & ((one_hot != 0).sum(axis=1) != 1)
    if unclear.any():
        raise InputError(
            f"{folder}: node {unclear.argmax()} has not exactly one class, though it is in the "
            "split; fetch the files again"
        )
    return make_graph(
        name=name,
        where=str(folder),
        edges=_edges(paths["graph"]),
        features=csr_array(vstack((allx, padded[order]), format="csr")),
        # A node without a class gets the first one, as in torch-geometric.
        labels=one_hot.argmax(axis=1),
        split=split,
    )


def _rows(path: Path) -> Any:  # scipy says that a csr_array may have no shape
    found = read_pickle(path)
    if not isinstance(found, csr_array):
        raise InputError(f"{path}: holds no sparse matrix (csr_matrix); fetch it again")
    return found


def _one_hot(path: Path) -> np.ndarray:
    found = read_pickle(path)
    if not isinstance(found, np.ndarray) or found.ndim != 2 or not found.size:
        raise InputError(
            f"{path}: holds no array of a row of classes for each node; fetch it again"
        )
    return found


def _numbers(path: Path) -> np.ndarray:
    try:
        numbers = np.array([int(line) for line in read_text(path).split()])
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        numbers = np.array([])
    # NumPy makes float64 of an empty list, and objects of numbers beyond int64.
    if numbers.dtype != np.int64:
        raise InputError(f"{path}: holds no list of numbers of nodes, one a line; fetch it again")
    return numbers


def _edges(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the table of each node's neighbours; return sources and targets without loops."""
    table = read_pickle(path)
    lists: list[Any] = list(table.values()) if isinstance(table, dict) else [None]
    # A small file could refer to one list many times, and so hold numbers without end.
    if (
        not _are_all(list, lists)
        or sum(map(len, lists)) > os.stat(path).st_size
        or not _are_all(int, chain(table, *lists))
    ):
        raise InputError(f"{path}: holds no table of the neighbours of nodes; fetch it again")
    nodes = np.array(list(table))
    targets = np.array(list(chain.from_iterable(lists)))
    sources = np.repeat(nodes, list(map(len, lists)))
    is_edge = sources != targets
    return sources[is_edge], targets[is_edge]


def _are_all(kind: type, values: Iterable[object]) -> bool:
    return set(map(type, values)) <= {kind}
