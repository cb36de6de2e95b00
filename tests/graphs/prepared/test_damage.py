"""Whatever is wrong with a prepared folder is told in one sentence that names the file."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.graphs.prepared.folders import DENSE, OTHER, write
from vigpipe.errors import InputError
from vigpipe.graphs.prepared.read import check_folder, open_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write(folder / "dense", DENSE)
    write(folder / "other", OTHER)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "dense", tmp_path / "dense")


@pytest.fixture
def other(made, tmp_path):
    return shutil.copytree(made / "other", tmp_path / "other")


FILES = ["nodes.safetensors", "edges/00002.safetensors", "features/00005.safetensors", "names.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_bit_is_found(other, name):
    content = bytearray((other / name).read_bytes())
    content[-3] ^= 1
    (other / name).write_bytes(content)
    message = rf"{name}: has the SHA-256 [0-9a-f]{{12}}…, but the manifest says [0-9a-f]{{12}}…; co"
    with pytest.raises(InputError, match=message):
        check_folder(other)


@pytest.mark.parametrize("name", FILES)
def test_so_is_a_file_that_is_not_wholly_there_or_not_at_all(other, name):
    os.truncate(other / name, 7)
    with pytest.raises(InputError, match=rf"{name}: has 7 bytes, but the manifest says [0-9]+; co"):
        check_folder(other)
    (other / name).unlink()
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(No such file"):
        check_folder(other)


def test_a_damaged_part_stops_only_who_needs_it(folder):
    os.truncate(folder / "features" / "00003.safetensors", 7)
    graph = open_folder(folder)
    _ = graph.features[graph.partition.nodes_of(2)]
    with pytest.raises(InputError, match="features/00003"):
        _ = graph.features[graph.partition.nodes_of(3)]


def forge(folder, name, **changes):
    """Change arrays of a file, or take them out, and write its new SHA-256 into the manifest."""
    arrays = {**load_file(folder / name), **changes}
    save_file({key: a for key, a in arrays.items() if a is not None}, folder / name)
    forge_bytes(folder, name, (folder / name).read_bytes())


def forge_bytes(folder, name, content):
    (folder / name).write_bytes(content)
    table = json.loads((folder / "manifest.json").read_text())
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    table["files"][name] = facts
    (folder / "manifest.json").write_text(json.dumps(table))


NODES, EDGES, FEATURES = (
    "nodes.safetensors",
    "edges/00001.safetensors",
    "features/00001.safetensors",
)
FORGED = {
    "edges from nowhere": (
        EDGES,
        {"indices": lambda a: a + 300},
        r"indices are not all in 0 … 299",
    ),
    "negative edges": (EDGES, {"indices": lambda a: -1 - a}, "indices are not all in"),
    "too few edges": (EDGES, {"indices": lambda a: a[1:].copy()}, r"indices is int32 of shape"),
    "floats as edges": (EDGES, {"indices": lambda a: a.astype(np.float32)}, "indices is float32"),
    "no edges": (EDGES, {"indices": None}, "'indices'"),
    "columns beyond": (FEATURES, {"indices": lambda a: a + 90}, "indices are not all in 0 … 89"),
    "rows that descend": (FEATURES, {"indptr": lambda a: a[::-1].copy()}, "indptr does not ascend"),
    "too few values": (FEATURES, {"values": lambda a: a[1:].copy()}, "indptr does not ascend"),
    "doubles": (FEATURES, {"values": lambda a: a.astype(np.float64)}, "values is float64"),
    "edges that descend": (NODES, {"indptr": lambda a: a[::-1].copy()}, "indptr does not ascend"),
    "fewer nodes": (NODES, {"split": lambda a: a[1:].copy()}, r"split is int8 of shape \(299,\)"),
    "another split": (NODES, {"split": lambda a: a + np.int8(2)}, "split are not all in -1 … 2"),
    "a node twice": (NODES, {"numbers": lambda a: a * 0}, "numbers has a node twice"),
    "numbers beyond": (NODES, {"numbers": lambda a: a + 1}, "numbers are not all in 0 … 299"),
    "other labels": (NODES, {"labels": lambda a: a[:, 1:].copy()}, r"labels is bool of shape"),
    "loops beyond": (NODES, {"loops": lambda a: a + 300}, "loops are not all in 0 … 299"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_file_reads_nothing_beyond_its_arrays(other, kind):
    name, changes, message = FORGED[kind]
    arrays = load_file(other / name)
    forge(other, name, **{k: None if f is None else f(arrays[k]) for k, f in changes.items()})
    with pytest.raises(InputError, match=rf"{name}: .*{message}.*; copy it again, or prepare"):
        check_folder(other)


def test_so_do_forged_labels_and_dense_features(folder):
    forge(folder, NODES, labels=np.full(300, 4))
    with pytest.raises(InputError, match="labels are not all in -1 … 3"):
        check_folder(folder)
    forge(folder, NODES, labels=np.full(300, 3))
    forge(folder, FEATURES, x=np.zeros((1, 5), np.float32))
    with pytest.raises(InputError, match=r"features/00001.safetensors: x is float32 of shape \(1,"):
        check_folder(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0" + b"{" * 40])
def test_bytes_that_are_no_safetensors_are_none(folder, content):
    forge_bytes(folder, EDGES, content)
    with pytest.raises(InputError, match=rf"{EDGES}: is not a safetensors file of arrays; copy"):
        check_folder(folder)


@pytest.mark.parametrize("content", ["{}", "[1]", json.dumps([1] * 300)])
def test_names_that_are_none_are_refused(other, content):
    forge_bytes(other, "names.json", content.encode())
    with pytest.raises(InputError, match=r"names\.json: (is no list of|has a name that)"):
        check_folder(other)


WRONG = {
    "format": ("other", "is not the manifest of a prepared graph; give a folder that"),
    "version": (2, "has another version of the format than 1; prepare the folder with the vigpipe"),
    "nodes": (301, "part_nodes do not add up to nodes; it was changed"),
    "edges": (-1, "edges is no whole number of 0 or more"),
    "features": (0, "kept_edges or features are out of range"),
    "stored": (1.5, "stored is no whole number"),
    "multi_label": (1, "multi_label is neither true nor false"),
    "class_names": (["a", "\x1b[2J"], "class_names is no text, or has control characters"),
    "source": (3, "source is no text"),
    "scaling": ("log", "scaling is none of raw, row, tfidf"),
    "symmetric": (None, "symmetric is neither"),
    "partition": ("best", "partition is none of"),
    "seed": (True, "seed is no whole number"),
    "kept_edges": (1 << 40, "kept_edges or features are out of range"),
    "seconds": (-1, "seconds are no duration"),
    "part_nodes": ([0, 300], "part_nodes is no whole number of 1 or more"),
    "graph_sha256": ("z" * 64, "graph_sha256 has no SHA-256"),
    "files": ({}, "files are not those of its parts"),
}


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("absent", [False, True])
def test_a_manifest_with_a_wrong_value_is_refused(folder, key, absent):
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    table[key], message = WRONG[key]
    if absent:
        del table[key]
        message = message if key in ("format", "version") else f"'{key}'"
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=rf"^{path}: .*{message}"):
        open_folder(folder)


def test_files_outside_of_the_folder_are_not_read(folder):
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    table["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": "0" * 64}
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match="files are not those of its parts"):
        open_folder(folder)
