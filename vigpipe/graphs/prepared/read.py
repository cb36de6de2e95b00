"""Open a prepared folder as a graph."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.names import check_class_names
from vigpipe.files.untrusted import read_json
from vigpipe.graphs.choices import Choices
from vigpipe.graphs.formats.checked import LEAST_WEIGHT, MOST_WEIGHT, check_features
from vigpipe.graphs.formats.labels import check_trainable
from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, TEST, UNKNOWN, are_labelled, digest_of
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
    check_class_names(manifest.class_names, str(folder))
    labels = _of_several(nodes["labels"]) if manifest.multi_label else nodes["labels"]
    split = np.where(are_labelled(labels), nodes["split"], np.int8(NO_SPLIT))
    check_trainable(labels, split, manifest.class_names, str(folder))
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
        labels=labels,
        split=split,
        class_names=manifest.class_names,
        node_names=_names(files, manifest),
        feature_weights=nodes.get("feature_weights"),
        numbers=nodes["numbers"],
        edge_weights=StoredRows(
            nodes["indptr"][first_nodes], (manifest.edges,), np.float32, parts.weights_into
        )
        if manifest.weighted
        else None,
        choices=Choices.parse(manifest.columns, str(folder)) if manifest.columns else None,
        manifest=manifest,
        stored_loops=nodes["loops"],
        stored_degrees=nodes.get("degrees"),
        stored_loop_weights=nodes.get("loop_weights"),
    )


def check_folder(folder: Path) -> Manifest:
    """Check every file of a folder, and what is in it; InputError if it is not what it must be."""
    graph = open_folder(folder)
    manifest, indptr = graph.manifest, graph.indptr
    parts = [*pairwise(manifest.first_nodes)]
    slices = (slice(*indptr[[start, end]].tolist()) for start, end in parts)
    edges = ((graph.indices[some], graph.weights_of(some)) for some in slices)
    found = digest_of(graph.class_names, indptr, edges, graph.labels, graph.split)
    for start, end in parts:
        _ = graph.features[start:end]
    if found != manifest.graph_sha256:
        raise InputError(
            f"{folder}: holds another graph than its manifest says by graph_sha256; prepare the "
            "folder anew"
        )
    return manifest


class _Parts:
    """What the files of a folder hold of its parts."""

    def __init__(self, files: Files, manifest: Manifest) -> None:
        self._files, self._manifest = files, manifest
        self.nodes = files.arrays(NODES, self._check_nodes)

    def edges_into(self, part: int) -> np.ndarray:
        return self._edges(part)["indices"]

    def weights_into(self, part: int) -> np.ndarray:
        return self._edges(part)["weights"]

    def _edges(self, part: int) -> Arrays:
        first, end = self._manifest.first_nodes[part : part + 2]
        check = partial(self._check_edges, first, end)
        return self._files.arrays(file_of_part("edges", part), check)

    def features(self, part: int) -> Rows:
        name = file_of_part("features", part)
        first, end = self._manifest.first_nodes[part : part + 2]

        def check(arrays: Arrays) -> None:
            self._check_shape(arrays, end - first)
            where = str(self._files.path(name))
            check_features(self._rows(arrays), where, self.nodes["numbers"][first:end])

        return self._rows(self._files.arrays(name, check))

    def _rows(self, arrays: Arrays) -> Rows:
        if self._manifest.stored is None:
            return arrays["x"]
        shape = len(arrays["indptr"]) - 1, self._manifest.features
        return csr_array((arrays["values"], arrays["indices"], arrays["indptr"]), shape=shape)

    def _check_shape(self, arrays: Arrays, num_nodes: int) -> None:
        if self._manifest.stored is None:
            array(arrays, "x", np.float32, num_nodes, self._manifest.features)
            return
        values = arrays["values"]
        array(arrays, "values", np.float32, len(values))
        check_rows(arrays, np.int32, num_nodes + 1, len(values))
        numbers(arrays, "indices", np.int32, len(values), 0, self._manifest.features)

    def _check_edges(self, first: int, end: int, arrays: Arrays) -> None:
        """Check the edges that end in the nodes first ... end - 1."""
        rows = self.nodes["indptr"][first : end + 1] - self.nodes["indptr"][first]
        num_edges, num_nodes = int(rows[-1]), self._manifest.nodes
        indices = numbers(arrays, "indices", np.int32, num_edges, 0, num_nodes)
        if self._manifest.weighted:
            weights = array(arrays, "weights", np.float32, num_edges)
            if not ((weights >= LEAST_WEIGHT) & (weights <= MOST_WEIGHT)).all():
                raise ValueError(f"weights are not all in {LEAST_WEIGHT:g} … {MOST_WEIGHT:g}")
        begins_row = np.zeros(num_edges + 1, np.bool_)
        begins_row[rows] = True
        if not (begins_row[1:-1] | (indices[1:] > indices[:-1])).all():
            raise ValueError("indices do not ascend for each node")
        targets = np.repeat(np.arange(first, end, dtype=np.int32), np.diff(rows))
        if self._manifest.weighted:
            degrees = np.bincount(targets - first, arrays["weights"], end - first)
            if not np.allclose(degrees, self.nodes["degrees"][first:end], rtol=1e-6, atol=0):
                raise ValueError(f"weights do not add up to the degrees of {NODES}")
        stored = self.nodes["loops"]
        stored = stored[(stored >= first) & (stored < end)]
        if not np.array_equal(targets[indices == targets], stored):
            raise ValueError(f"indices have other edges from a node to itself than {NODES}")

    def _check_nodes(self, arrays: Arrays) -> None:
        num_nodes, num_classes = self._manifest.nodes, len(self._manifest.class_names)
        check_rows(arrays, np.int64, num_nodes + 1, self._manifest.edges)
        in_files = numbers(arrays, "numbers", np.int64, num_nodes, 0, num_nodes)
        if (np.bincount(in_files, minlength=num_nodes) != 1).any():
            raise ValueError("numbers has a node twice")
        if self._manifest.multi_label:
            labels = _of_several(arrays["labels"])
            array({"labels": labels}, "labels", np.int8, num_nodes, num_classes)
            if ((labels < UNKNOWN) | (labels > 1)).any():
                raise ValueError(f"labels are not all in {UNKNOWN} … 1")
        else:
            numbers(arrays, "labels", np.int64, num_nodes, NO_CLASS, num_classes)
        numbers(arrays, "split", np.int8, num_nodes, NO_SPLIT, TEST + 1)
        if "feature_weights" in arrays:
            array(arrays, "feature_weights", np.float32, self._manifest.features)
        numbers(arrays, "loops", np.int64, len(arrays["loops"]), 0, num_nodes)
        if self._manifest.weighted:
            array(arrays, "degrees", np.float64, num_nodes)
            array(arrays, "loop_weights", np.float32, num_nodes)


def _of_several(labels: np.ndarray) -> np.ndarray:
    """Return labels of several classes as `Graph` has them; older versions have written bools."""
    return labels.view(np.int8) if labels.dtype == np.bool_ else labels


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
