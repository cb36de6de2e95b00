"""Read what `vigpipe dataset import` is given, and write it as a graph file."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array, csc_array, csr_array

from vigpipe.config.verbs import ImportConfig
from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.npy import names_in, read_npy, read_npz
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.graphs.choices import COLUMNS, Choices
from vigpipe.graphs.features import in_memory
from vigpipe.graphs.formats import graphsaint, ogb
from vigpipe.graphs.formats.graph_file import EDGES, graph_of, in_our_names, read_arrays
from vigpipe.graphs.graph import NO_SPLIT, TEST, TRAIN, VALIDATION, Graph, are_labelled
from vigpipe.graphs.imports.from_tables import Names, Nodes, read_edges
from vigpipe.graphs.imports.objects import arrays_of, has_several
from vigpipe.graphs.imports.saved_data import read_saved_data
from vigpipe.graphs.imports.tables import open_table
from vigpipe.graphs.imports.write import write_graph_file
from vigpipe.job.held_out import held_out


@dataclass
class Imported:
    """A graph that is to be written."""

    where: str  # what messages begin with
    arrays: dict[str, np.ndarray]
    nodes: Nodes | None = None  # whose features are made while they are written
    notes: list[str] = field(default_factory=list)

    @property
    def has_split(self) -> bool:
        return "split" in self.arrays

    def write(self, out: Path) -> Graph:
        """Write a graph file, and return what it holds; InputError if that is no graph."""
        arrays, rows = dict(self.arrays), None
        if self.nodes is not None:
            choices = self.nodes.choices
            arrays[COLUMNS] = np.array([choices.as_text()])
            rows = (len(self.nodes), choices.width), self.nodes.rows()
        trains = "y" in arrays and (arrays.get("split", np.zeros(0)) == TRAIN).any()

        def check(partial: Path) -> Graph:
            found = read_arrays(partial, trains=bool(trains))
            several = has_several(found.get("y"))
            return graph_of(found, self.where, multi_label=several, trains=bool(trains))

        graph = write_graph_file(out, arrays, check, rows)
        if self.nodes is not None:
            self.notes += self.nodes.notes
        return graph


def read_imported(config: ImportConfig) -> Imported:
    """Read what the options name; InputError if it is not what they say."""
    if config.data is not None:
        imported = Imported(str(config.data), _whole(config.data))
    else:
        imported = _of_tables(config)
    arrays = imported.arrays
    if "y" not in arrays:
        if config.test:
            raise InputError(
                f"--test {config.test}: draws nodes that have a class, and {imported.where} has no "
                "labels; leave it out"
            )
        return imported
    if "split" in arrays:
        if config.test:
            raise InputError(
                f"--test {config.test}: draws a split, and {imported.where} has one; leave it out"
            )
    elif config.test:
        arrays["split"] = _drawn(arrays["y"], config, imported.where)
    else:
        imported.notes.append(
            "no split: to train on this graph, import it with --test 0.2 --validation 0.1"
        )
    return imported


def _of_tables(config: ImportConfig) -> Imported:
    assert config.edges is not None
    names, notes = _names(config), list[str]()
    arrays: dict[str, np.ndarray] = {}
    nodes = None
    if config.nodes is not None:
        table = open_table(config.nodes)
        if config.features is not None:
            others = {*names.label, names.split, names.id}
            dropped = tuple(name for name in table.columns if name not in others)
            if dropped:
                notes.append(f"columns that --features takes the place of: {', '.join(dropped)}")
            names = replace(names, drop=dropped, numbers=(), categories=())
        nodes = Nodes(table, names, None if config.like is None else _choices_of(config.like))
        arrays |= nodes.arrays()
    if config.features is not None:
        arrays |= _features(config.features)
        num_rows = _num_rows(arrays)
        if nodes is not None and len(nodes) != num_rows:
            raise InputError(
                f"{config.features}: has {num_rows:,} rows, but {config.nodes} {len(nodes):,}; "
                "give a row of features for each node, in the same order"
            )
    elif nodes is not None and not nodes.choices.width:
        raise InputError(
            f"{config.nodes}: has no column for features beside id, label and split; add some, or "
            "name a file of --features"
        )
    if config.edges.suffix == ".npz":
        edges, weights = _matrix(config.edges, len(nodes) if nodes else _num_rows(arrays))
        arrays |= dict(zip(EDGES, edges, strict=True))
        arrays |= {} if weights is None else {"edge_weight": weights}
    else:
        place_of = nodes.place_of if nodes else {str(i): i for i in range(_num_rows(arrays))}
        of_nodes = str(config.nodes or config.features)
        read, of_edges = read_edges(open_table(config.edges), names, place_of, of_nodes)
        arrays |= read
        notes += of_edges
    made_of = nodes if config.features is None else None
    return Imported(str(config.nodes or config.features), arrays, made_of, notes)


def _num_rows(arrays: dict[str, np.ndarray]) -> int:
    """Return how many nodes have features."""
    return len(arrays["x_indptr"]) - 1 if "x_indptr" in arrays else len(arrays["x"])


def _names(config: ImportConfig) -> Names:
    def several(text: str | None) -> tuple[str, ...]:
        return tuple(word.strip() for word in (text or "").split(",") if word.strip())

    return Names(
        config.id,
        several(config.label),
        config.split,
        config.source,
        config.target,
        config.weight,
        several(config.numbers),
        several(config.categories),
        several(config.drop),
    )


def _whole(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a whole graph."""
    where = f"--data {path}"
    if path.suffix == ".npz":
        return in_our_names(read_arrays(path, trains=False), str(path))
    if path.suffix == ".pt":
        return in_our_names(arrays_of(read_saved_data(path), str(path)), str(path))
    for layout in (ogb, graphsaint):
        if layout.holds(path):
            return _arrays_of_graph(layout.read(path.name, path))
    raise InputError(
        f"{where}: is neither a saved Data (.pt), a graph file (.npz), nor a folder with "
        "raw/edge.csv.gz, as those of the Open Graph Benchmark, or adj_full.npz, as GraphSAINT's"
    )


def _arrays_of_graph(graph: Graph) -> dict[str, np.ndarray]:
    arrays: dict[str, Any] = {
        "edge_src": graph.sources(),
        "edge_dst": graph.targets(),
        "edge_weight": graph.weights_of(slice(None)),
        "y": graph.labels,
        "split": graph.split,
        "classes": np.array(graph.class_names),
    }
    features = in_memory(graph.features)
    arrays |= _rows_of(features) if isinstance(features, csr_array) else {"x": features}
    return {name: array for name, array in arrays.items() if array is not None}


def _rows_of(rows: csr_array) -> dict[str, np.ndarray]:
    return {
        "x_indptr": rows.indptr,
        "x_indices": rows.indices,
        "x_data": rows.data,
        "x_shape": np.array(rows.shape),
    }


def _matrix(path: Path, num_nodes: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray | None]:
    """Return the edges of a matrix, from its rows to its columns, and weights if not all are 1."""
    rows = _scipy(path)
    shape: Any = rows.shape
    if shape != (num_nodes, num_nodes):
        raise InputError(
            f"{path}: is {shape[0]} × {shape[1]}, expected a row and a column for each of the "
            f"{num_nodes} nodes, in their order"
        )
    sources = np.repeat(np.arange(num_nodes), np.diff(rows.indptr))
    return (sources, rows.indices), None if (rows.data == 1).all() else rows.data


def _features(path: Path) -> dict[str, np.ndarray]:
    if path.suffix != ".npy":
        return _rows_of(_scipy(path))
    x = read_npy(path, mapped=True)
    if x.ndim != 2:
        raise InputError(f"{path}: has the shape {x.shape}, expected (n, d), a row for each node")
    return {"x": x}


_ARRAYS = {b"csr": ("indices", "indptr"), b"csc": ("indices", "indptr"), b"coo": ("row", "col")}


def _scipy(path: Path) -> csr_array:
    """Read a matrix of scipy.sparse.save_npz; numbers of one place are added, zeros left out."""
    has = names_in(path) if path.suffix == ".npz" else []
    kind = read_npz(path, ("format",))["format"].tobytes() if "format" in has else b""
    if kind not in _ARRAYS:
        raise InputError(
            f"{path}: is not a csr, csc or coo matrix of scipy; save it with "
            "scipy.sparse.save_npz(path, matrix.tocsr())"
        )
    arrays = read_npz(path, ("data", "shape", *_ARRAYS[kind]))
    data, shape = arrays["data"], tuple(arrays["shape"].tolist())
    first, second = (arrays[name] for name in _ARRAYS[kind])
    try:
        if kind == b"coo":
            rows = csr_array(coo_array((data, (first, second)), shape))
        else:
            made = (csr_array if kind == b"csr" else csc_array)((data, first, second), shape)
            made.check_format(full_check=True)
            rows = csr_array(made)
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(
            f"{path}: is no matrix of scipy ({escaped(str(error))}); save it again"
        ) from error
    rows.sum_duplicates()
    rows.eliminate_zeros()
    return rows


def _choices_of(path: Path) -> Choices:
    """Return the choices that a graph file or a file of weights keeps."""
    if path.suffix == ".npz":
        found = read_npz(path, (), (COLUMNS,)).get(COLUMNS)
        text = str(found[0]) if found is not None and found.shape == (1,) else None
    else:
        text = read_metadata(path).get(COLUMNS)
    if text is None:
        raise InputError(
            f"--like {path}: does not say how its features were made of columns, as only graphs do "
            "that were imported from tables, and weights that were trained on them; leave it out"
        )
    return Choices.parse(text, str(path))


def _drawn(labels: np.ndarray, config: ImportConfig, where: str) -> np.ndarray:
    """Draw a split of the nodes with a class, of every class, or without regard to it."""
    is_known = are_labelled(_comparable(labels))
    nodes = np.flatnonzero(is_known)
    of_nodes = np.zeros(len(nodes), np.int64)
    if config.stratified and not has_several(labels):
        of_nodes = np.unique(labels[nodes], return_inverse=True)[1].ravel()
    elif config.stratified and (_comparable(labels) >= 0).all():
        several = labels[nodes] == 1
        of_nodes = several.argmax(1) if (several.sum(1) == 1).all() else of_nodes
    split = np.full(len(labels), NO_SPLIT, np.int8)
    split[nodes] = TRAIN
    for part, share in ((TEST, config.test), (VALIDATION, config.validation)):
        left = split[nodes] == TRAIN
        drawn = held_out(of_nodes[left], share, config.seed + (part == VALIDATION))
        split[nodes[left][drawn]] = part
    if not (split == TEST).any():
        raise InputError(
            f"--test {config.test}: draws none of the {len(nodes):,} nodes of {where} that have a "
            "class; choose a larger share, or --no-stratified"
        )
    return split


def _comparable(labels: np.ndarray) -> np.ndarray:
    """Return labels in which -1 stands for what is not known."""
    if labels.dtype.kind == "f":
        return np.where(np.isnan(labels), -1, labels)
    return labels.astype(np.int8) if labels.dtype.kind == "b" else labels
