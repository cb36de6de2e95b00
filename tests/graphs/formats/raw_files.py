"""Small data sets in the raw files of each format, drawn at random."""

import json
import pickle
import struct
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

PythonsOwn: Any = vars(pickle)["_Pickler"]  # pickle's, in Python


class Python2Pickler(PythonsOwn):
    """Writes bytes as Python 2's strings."""

    def save_string(self, text):
        self.write(b"T" + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch: ClassVar[Any] = {**PythonsOwn.dispatch, bytes: save_string}


def write_python2(path, content):
    """Write a pickle as Python 2, the NumPy and the SciPy of that time did."""
    with path.open("wb") as file:
        Python2Pickler(file, 2).dump(content)
    text = path.read_bytes()
    for new, old in (
        (b"numpy._core.", b"numpy.core."),
        (b"scipy.sparse._csr", b"scipy.sparse.csr"),
    ):
        text = text.replace(b"c" + new, b"c" + old)
    path.write_bytes(text)


def planetoid_parts(seed, gaps=()):
    """Draw what Planetoid's files hold: 12 labelled nodes, 520 others, and 30 to test with.

    Args:
        seed: of the draw.
        gaps: places among the test nodes that are isolated and absent from the files.
    """
    generator = np.random.default_rng(seed)
    num_known, num_test = 532, 30
    num_nodes = num_known + num_test + len(gaps)

    def features(n):
        dense = generator.random((n, 9)) * (generator.random((n, 9)) < 0.3)
        return sparse.csr_matrix(dense.astype(np.float32))

    def one_hot(n):
        return np.eye(3, dtype=np.int32)[np.arange(n) % 3]

    test = np.setdiff1d(np.arange(num_known, num_nodes), num_known + np.array(gaps, int))
    graph = defaultdict(list)
    for node in range(num_nodes):
        graph[node] = []
    for a, b in generator.integers(
        num_nodes, size=(2000, 2)
    ).tolist():  # with loops, and some twice
        graph[a].append(b)
        graph[b].append(a)
    allx, ally = features(num_known), one_hot(num_known)
    return {
        "x": allx[:12],
        "tx": features(num_test),
        "allx": allx,
        "y": ally[:12],
        "ty": one_hot(num_test),
        "ally": ally,
        "graph": graph,
        "test.index": generator.permutation(test),
    }


def write_ogb(folder, split, seed):
    """Write the tables of the Open Graph Benchmark into a folder."""
    generator = np.random.default_rng(seed)
    num_nodes = 60
    tables = {
        "raw/edge": generator.integers(num_nodes, size=(400, 2)),
        "raw/node-feat": generator.normal(size=(num_nodes, 7)).astype(np.float32).round(3),
        "raw/node-label": np.arange(num_nodes)[:, None] % 3,
    }
    nodes = generator.permutation(num_nodes)
    parts = zip(("train", "valid", "test"), np.split(nodes, (30, 45)), strict=True)
    tables |= {f"split/{split}/{part}": some for part, some in parts}
    for name, table in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, table, "%g", delimiter=",")
    return tables


def write_planetoid(root, name, parts, write=write_python2):
    """Write Planetoid's files into root/<name>/raw, and return that folder."""
    folder = root / name / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for part, content in parts.items():
        path = folder / f"ind.{name.lower()}.{part}"
        if part == "test.index":
            path.write_text("".join(f"{number}\n" for number in content))
        else:
            write(path, content)
    return folder


def write_reddit(root, seed):
    """Write Reddit's two files into root/raw, and return that folder."""
    generator = np.random.default_rng(seed)
    folder = root / "raw"
    folder.mkdir(parents=True)
    np.savez(
        folder / "reddit_data.npz",
        feature=generator.random((40, 5)),
        label=np.arange(40) % 3,
        node_types=np.repeat((1, 2, 3, 1), 10),
        node_ids=np.arange(40),
    )
    adjacency = sparse.random(40, 40, 0.1, format="csr", rng=generator)
    sparse.save_npz(folder / "reddit_graph.npz", sparse.coo_matrix(adjacency + adjacency.T))
    return folder


def write_graphsaint(root, seed, *, multi_label):
    """Write GraphSAINT's four files into root/raw, and return that folder."""
    generator = np.random.default_rng(seed)
    folder = root / "raw"
    folder.mkdir(parents=True)
    adjacency = sparse.csr_matrix(sparse.random(40, 40, 0.1, rng=generator))
    np.savez(
        folder / "adj_full.npz",
        data=adjacency.data,
        indices=adjacency.indices,
        indptr=adjacency.indptr,
        shape=np.array(adjacency.shape),
        format=np.array(b"csr"),
    )
    np.save(folder / "feats.npy", generator.standard_normal((40, 5)))
    classes = (generator.random((40, 4)) < 0.4).astype(int) if multi_label else np.arange(40) % 3
    order = generator.permutation(40).tolist()
    table = {str(node): classes[node].tolist() for node in order}
    (folder / "class_map.json").write_text(json.dumps(table))
    roles = {"tr": order[:20], "va": order[20:28], "te": order[28:38]}
    (folder / "role.json").write_text(json.dumps(roles))
    return folder
