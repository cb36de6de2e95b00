"""Reddit2, Flickr, Yelp and AmazonProducts, in the four files of GraphSAINT.

Source: Zeng, Zhou, Srivastava, Kannan, Prasanna, GraphSAINT: Graph Sampling Based Inductive
Learning Method, ICLR 2020 (arXiv 1907.04931); read as torch-geometric reads them.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.npy import read_npy, read_npz
from vigpipe.files.untrusted import read_json
from vigpipe.graphs.formats.checked import make_graph, make_split
from vigpipe.graphs.graph import NO_CLASS, TEST, TRAIN, VALIDATION, Graph, are_rows

FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
_ROLES = {"tr": TRAIN, "va": VALIDATION, "te": TEST}
_MOST_JSON = 2 << 30  # AmazonProducts' classes are zeros and ones of 1,569,960 × 107


def read(name: str, folder: Path) -> Graph:
    """Read a graph from FILES. Its features are not scaled; GraphSAINT's own code scales them."""
    adjacency, features_path, classes, roles = (folder / file for file in FILES)
    features = read_npy(features_path, mapped=True)
    if not features.size or features.ndim != 2:
        raise InputError(
            f"{features_path}: has the shape {features.shape}, expected (n, d): the d features of "
            "each node; fetch it again"
        )
    num_nodes = len(features)
    edges, weights = read_matrix(adjacency)
    return make_graph(
        name=name,
        where=str(folder),
        edges=edges,
        edge_weights=weights,
        features=features,
        labels=_labels(classes, num_nodes),
        split=_split(roles, num_nodes),
    )


def holds(folder: Path) -> bool:
    """Whether a folder is laid out so."""
    return os.path.isfile(folder / FILES[0])


def read_matrix(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray | None]:
    """Read an adjacency matrix of scipy, in compressed rows; an edge goes from a row to a column.

    Returns the rows and columns, (e,) integers each, and the numbers there, unless all are 1.
    """
    arrays = read_npz(path, ("indptr", "indices"), ("data",))
    indptr, targets, numbers = arrays["indptr"], arrays["indices"], arrays.get("data")
    is_whole = indptr.dtype.kind in "iu" and targets.dtype.kind in "iu"
    if not is_whole or indptr.ndim != 1 or targets.ndim != 1 or not are_rows(indptr, len(targets)):
        raise InputError(
            f"{path}: its indptr does not ascend from 0 to the number of its indices; fetch it "
            "again"
        )
    counts = np.diff(indptr.astype(np.int64))
    edges = np.repeat(np.arange(len(counts)), counts), targets
    return edges, None if numbers is None or (numbers == 1).all() else numbers


def _labels(path: Path, num_nodes: int) -> np.ndarray:
    """Read the table of nodes: a class is a number, several classes are zeros and ones."""
    table = _table(path)
    try:
        nodes = np.fromiter(map(int, table), np.int64, len(table))
        found = np.array(list(table.values()))
    except (ValueError, OverflowError, TypeError) as error:
        raise InputError(
            f"{path}: its keys are no numbers of nodes, or its values are neither classes nor "
            "lists of zeros and ones of the same length; fetch it again"
        ) from error
    if not len(nodes) or nodes.min() < 0 or nodes.max() >= num_nodes:
        raise InputError(
            f"{path}: has classes of other nodes than 0 … {num_nodes - 1}, those that have "
            "features; fetch it again"
        )
    labels = np.full((num_nodes, *found.shape[1:]), NO_CLASS if found.ndim == 1 else 0, found.dtype)
    labels[nodes] = found
    return labels


def _split(path: Path, num_nodes: int) -> np.ndarray:
    table = _table(path)
    parts = ((part, _numbers(table.get(role)), role) for role, part in _ROLES.items())
    return make_split(((p, nodes, f"{path}: '{role}'") for p, nodes, role in parts), num_nodes)


def _numbers(found: object) -> np.ndarray | None:
    """Return a list of whole numbers as an array; None for anything else."""
    try:
        nodes = np.array(found)
    except ValueError:  # lists of different lengths
        return None
    return nodes if nodes.ndim == 1 and nodes.dtype == np.int64 else None


def _table(path: Path) -> dict[str, Any]:
    found = read_json(path, _MOST_JSON)
    if not isinstance(found, dict):
        raise InputError(f"{path}: is no table; fetch it again")
    return found
