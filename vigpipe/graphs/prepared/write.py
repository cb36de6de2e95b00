"""Make a prepared folder of a graph and its parts."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.atomic import making
from vigpipe.files.names import escaped
from vigpipe.files.outputs import check_new_folder
from vigpipe.files.untrusted import file_digest
from vigpipe.graphs.features import Scaling, num_stored
from vigpipe.graphs.graph import UNKNOWN, Graph, digest_of, sort_rows
from vigpipe.graphs.partitions.partition import Partition
from vigpipe.graphs.prepared.manifest import (
    MOST_PARTS,
    NAMES,
    NODES,
    FileFacts,
    Manifest,
    file_of_part,
    write_manifest,
)
from vigpipe.graphs.stored_rows import StoredRows

_NUMBERS_AT_ONCE = 1 << 24  # features in memory on their way to the files
MOST_IN_FILE = 1 << 31  # nodes, and numbers of a part's sparse features, which int32 counts


def write_folder(
    folder: Path,
    graph: Graph,
    partition: Partition,
    *,
    scaling: Scaling,
    symmetric: bool,
    seed: int,
) -> Manifest:
    """Write a graph as a folder that `read.open_folder` opens, whole or not at all.

    Besides the graph, memory holds the edges of one part, and features of some nodes. The graph's
    features are already scaled, and its edges as they are to be used; scaling, symmetric and the
    partition's seed say how they came about.
    """
    if graph.num_nodes > MOST_IN_FILE or partition.num_parts > MOST_PARTS:
        raise InputError(
            f"{folder}: would have {graph.num_nodes:,} nodes in {partition.num_parts:,} parts, but "
            f"a folder has at most {MOST_IN_FILE:,} nodes and {MOST_PARTS:,} parts; choose fewer"
        )
    check_new_folder(folder)
    with _whole_or_not_at_all(folder) as partial:
        files, digest = _write_arrays(partial, graph, partition)
        manifest = Manifest(
            source=escaped(graph.name),
            nodes=graph.num_nodes,
            edges=graph.num_edges,
            weighted=graph.edge_weights is not None,
            unknown=_has_unknown(graph),
            features=graph.num_features,
            stored=num_stored(graph.features),
            multi_label=graph.is_multi_label,
            class_names=graph.class_names,
            columns=None if graph.choices is None else graph.choices.as_text(),
            scaling=scaling,
            symmetric=symmetric,
            partition=partition.method,
            seed=seed,
            kept_edges=partition.num_kept,
            seconds=partition.seconds,
            part_nodes=tuple(partition.sizes.tolist()),
            graph_sha256=digest,
            files=files,
        )
        write_manifest(partial, manifest)
    return manifest


def _has_unknown(graph: Graph) -> bool:
    return graph.is_multi_label and bool((graph.labels == UNKNOWN).any())


@contextmanager
def _whole_or_not_at_all(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder, which is renamed to `folder` at the end; an error leaves nothing."""
    try:
        with making(folder) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{folder}: cannot be written ({why})") from error


def _write_arrays(
    folder: Path, graph: Graph, partition: Partition
) -> tuple[dict[str, FileFacts], str]:
    """Write all files but the manifest; return their facts, and `Graph.sha256` in the new order."""
    for name in ("edges", "features"):
        (folder / name).mkdir()
    order = np.argsort(partition.parts, kind="stable")
    new_numbers = np.empty(graph.num_nodes, np.int32)
    new_numbers[order] = np.arange(graph.num_nodes)
    indptr = np.append(0, np.cumsum(np.diff(graph.indptr)[order]))
    labels, split = graph.labels[order], graph.split[order]
    if graph.is_multi_label and not _has_unknown(graph):
        labels = labels.astype(np.bool_)  # as earlier versions have them

    files: dict[str, FileFacts] = {}
    edges = _write_parts(folder, graph, partition, new_numbers, files)  # as they are digested
    digest = digest_of(graph.class_names, indptr, edges, labels, split)
    if num_stored(graph.features) is None:
        assert not isinstance(graph.features, csr_array)
        _write_dense(folder, graph.features, partition, files)
    nodes = {
        "indptr": indptr,
        "labels": labels,
        "split": split,
        "numbers": graph.numbers_of(order),
        "loops": np.sort(new_numbers[graph.loops]).astype(np.int64),
    }
    if graph.loop_weights is not None:
        nodes |= {"degrees": graph.degrees[order], "loop_weights": graph.loop_weights[order]}
    if graph.feature_weights is not None:
        nodes["feature_weights"] = graph.feature_weights
    _save(folder, NODES, nodes, files)
    if graph.node_names is not None:
        names = json.dumps([graph.node_names[node] for node in order])
        (folder / NAMES).write_text(names, encoding="utf-8")
        files[NAMES] = FileFacts(*file_digest(folder / NAMES))
    return files, digest


def _write_parts(
    folder: Path,
    graph: Graph,
    partition: Partition,
    new_numbers: np.ndarray,
    files: dict[str, FileFacts],
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Write every part's edges, and its features if they are sparse; yield what is digested."""
    is_sparse = num_stored(graph.features) is not None
    for part in range(partition.num_parts):
        nodes = partition.nodes_of(part)
        indptr, edges = graph.edges_into(nodes)
        indices, order = sort_rows(indptr, new_numbers[graph.indices[edges]])
        of_edges, weights = {"indices": indices}, graph.weights_of(edges[order])
        if weights is not None:
            of_edges["weights"] = weights
        _save(folder, file_of_part("edges", part), of_edges, files)
        if is_sparse:
            rows: Any = graph.features[nodes]
            name = file_of_part("features", part)
            _save(folder, name, _sparse(rows, partition.num_parts), files)
        yield indices.astype(np.int64), weights


def _write_dense(
    folder: Path,
    features: np.ndarray | StoredRows,
    partition: Partition,
    files: dict[str, FileFacts],
) -> None:
    """Write the features of all parts in one pass over those of the graph.

    The nodes of a part keep their order, so rows are only appended to its file. Reading the rows in
    the order of the parts would touch a file that is larger than memory page by page.
    """
    names = [file_of_part("features", part) for part in range(partition.num_parts)]
    paths = [folder / name for name in names]
    headers = [_header(size, features.shape[1]) for size in partition.sizes.tolist()]
    digests = [hashlib.sha256(header) for header in headers]
    for path, header in zip(paths, headers, strict=True):
        path.write_bytes(header)
    num_rows = max(1, _NUMBERS_AT_ONCE // features.shape[1])
    for first in range(0, len(features), num_rows):
        rows, parts = features[first : first + num_rows], partition.parts[first : first + num_rows]
        for part in np.unique(parts):
            content = rows[parts == part].data.cast("B")
            digests[part].update(content)
            with paths[part].open("ab") as file:
                file.write(content)
    for name, path, digest in zip(names, paths, digests, strict=True):
        files[name] = FileFacts(path.stat().st_size, digest.hexdigest())


def _header(num_nodes: int, num_features: int) -> bytes:
    """Return the head of a safetensors file that holds only float32 `x` of this shape."""
    size = num_nodes * num_features * 4
    facts = {"dtype": "F32", "shape": [num_nodes, num_features], "data_offsets": [0, size]}
    text = json.dumps({"x": facts}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sparse(rows: csr_array, num_parts: int) -> dict[str, np.ndarray]:
    if rows.nnz >= MOST_IN_FILE:
        raise InputError(
            f"--parts {num_parts}: a part would have {rows.nnz:,} numbers that are not 0, at most "
            f"{MOST_IN_FILE - 1:,} are possible; choose more parts"
        )
    indptr, indices = (a.astype(np.int32) for a in (rows.indptr, rows.indices))
    return {"indptr": indptr, "indices": indices, "values": rows.data}


def _save(folder: Path, name: str, arrays: Mapping[str, Any], files: dict[str, FileFacts]) -> None:
    save_file(dict(arrays), folder / name)
    files[name] = FileFacts(*file_digest(folder / name))
