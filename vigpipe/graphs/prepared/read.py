"""Open a prepared folder as a graph."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_json
from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, TEST
from vigpipe.graphs.prepared.files import Arrays, Files, array, check_rows, numbers
from vigpipe.graphs.prepared.graph import PreparedGraph
from vigpipe.graphs.prepared.manifest import NAMES, NODES, Manifest, file_of_part, read_manifest
from vigpipe.graphs.stored_rows import Rows, StoredRows


def open_folder(folder: Path) -> PreparedGraph:
    """Open a folder; its edges and features are read, and checked, part by part when needed."""
    manifest = read_manifest(folder)
    files = Files(folder, manifest.files)
    parts = _Parts(files, manifest)
    nodes, first_nodes = parts.nodes, np.array(manifest.first_nodes)
    return PreparedGraph(
        name=str(folder),
        indptr=nodes["indptr"],
        indices=StoredRows(
            nodes["indptr"][first_nodes], (manifest.edges,), np.int64, parts.edges_into
        ),
        features=StoredRows(
            first_nodes,
            (manifest.nodes, manifest.features),
            np.float32,
            parts.features,
            manifest.stored,
        ),
        labels=nodes["labels"],
        split=nodes["split"],
        class_names=manifest.class_names,
        node_names=_names(files, manifest),
        feature_weights=nodes.get("feature_weights"),
        numbers=nodes["numbers"],
        manifest=manifest,
        stored_loops=nodes["loops"],
    )


def check_folder(folder: Path) -> Manifest:
    """Check every file of a folder, and what is in it; InputError if it is not what it must be."""
    graph = open_folder(folder)
    firsts = graph.manifest.first_nodes
    for start, end in pairwise(firsts):
        _ = graph.indices[graph.indptr[start] : graph.indptr[end]], graph.features[start:end]
    return graph.manifest


class _Parts:
    """What the files of a folder hold of its parts."""

    def __init__(self, files: Files, manifest: Manifest) -> None:
        self._files, self._manifest = files, manifest
        self.nodes = files.arrays(NODES, self._check_nodes)

    def edges_into(self, part: int) -> np.ndarray:
        start, end = self._manifest.first_nodes[part : part + 2]
        num_edges = int(self.nodes["indptr"][end] - self.nodes["indptr"][start])
        arrays = self._files.arrays(
            file_of_part("edges", part),
            lambda arrays: numbers(arrays, "indices", np.int32, num_edges, 0, self._manifest.nodes),
        )
        return arrays["indices"]

    def features(self, part: int) -> Rows:
        shape = self._manifest.part_nodes[part], self._manifest.features
        is_dense = self._manifest.stored is None

        def check(arrays: Arrays) -> None:
            if is_dense:
                array(arrays, "x", np.float32, *shape)
                return
            values = arrays["values"]
            array(arrays, "values", np.float32, len(values))
            check_rows(arrays, np.int32, shape[0] + 1, len(values))
            numbers(arrays, "indices", np.int32, len(values), 0, shape[1])

        arrays = self._files.arrays(file_of_part("features", part), check)
        if is_dense:
            return arrays["x"]
        return csr_array((arrays["values"], arrays["indices"], arrays["indptr"]), shape=shape)

    def _check_nodes(self, arrays: Arrays) -> None:
        num_nodes, num_classes = self._manifest.nodes, len(self._manifest.class_names)
        check_rows(arrays, np.int64, num_nodes + 1, self._manifest.edges)
        in_files = numbers(arrays, "numbers", np.int64, num_nodes, 0, num_nodes)
        if (np.bincount(in_files, minlength=num_nodes) != 1).any():
            raise ValueError("numbers has a node twice")
        if self._manifest.multi_label:
            array(arrays, "labels", np.bool_, num_nodes, num_classes)
        else:
            numbers(arrays, "labels", np.int64, num_nodes, NO_CLASS, num_classes)
        numbers(arrays, "split", np.int8, num_nodes, NO_SPLIT, TEST + 1)
        if "feature_weights" in arrays:
            array(arrays, "feature_weights", np.float32, self._manifest.features)
        numbers(arrays, "loops", np.int64, len(arrays["loops"]), 0, num_nodes)


def _names(files: Files, manifest: Manifest) -> tuple[str, ...] | None:
    if NAMES not in manifest.files:
        return None
    path = files.checked(NAMES)
    names = read_json(path, manifest.files[NAMES].bytes)
    if not isinstance(names, list) or len(names) != manifest.nodes:
        raise InputError(f"{path}: is no list of the names of its nodes; prepare the folder anew")
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: has a name that is no text; prepare the folder anew")
    return tuple(names)
