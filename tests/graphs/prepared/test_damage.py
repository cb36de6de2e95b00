"""Whatever is wrong with a prepared folder is told in one sentence that names the file."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.graphs.prepared.folders import DENSE, OTHER, write
from tests.graphs.restored import restored
from tests.refusals import check_refusals
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


@pytest.mark.parametrize("name", ["nodes.safetensors", "edges/00002.safetensors", "names.json"])
def test_a_file_that_is_changed_cut_or_gone_is_found(other, name):
    content = bytearray((other / name).read_bytes())
    content[-3] ^= 1

    def attempt(content):
        (other / name).unlink()
        if content is not None:
            (other / name).write_bytes(content)
        check_folder(other)

    rows = [
        (content, r"has the SHA-256 [0-9a-f]{12}…, but the manifest says [0-9a-f]{12}…; co"),
        (content[:7], r"has 7 bytes, but the manifest says [0-9]+; co"),
        (None, r"cannot be read \(No such file"),
    ]
    check_refusals([(content, f"{name}: {message}") for content, message in rows], attempt)


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
    table["files"][str(name)] = facts
    (folder / "manifest.json").write_text(json.dumps(table))


NODES, EDGES, FEATURES = "nodes", "edges/00001", "features/00001"
FORGED = [
    (EDGES, "indices", lambda a: a + 300, r"indices are not all in 0 … 299"),
    (EDGES, "indices", lambda a: a[1:].copy(), r"indices is int32 of shape"),
    (EDGES, "indices", lambda a: None, "'indices'"),
    (FEATURES, "indices", lambda a: a + 90, "indices are not all in 0 … 89"),
    (FEATURES, "indptr", lambda a: a[::-1].copy(), "indptr does not ascend"),
    (FEATURES, "values", lambda a: a[1:].copy(), "indptr does not ascend"),
    (NODES, "split", lambda a: a + np.int8(2), "split are not all in -1 … 2"),
    (NODES, "numbers", lambda a: a * 0, "numbers has a node twice"),
    (NODES, "loops", lambda a: a + 300, "loops are not all in 0 … 299"),
    (EDGES, "indices", lambda a: a[::-1].copy(), "indices do not ascend for each node"),
    (EDGES, "indices", lambda a: np.repeat(a[::2], 2)[: len(a)].copy(), "indices do not ascend"),
]
FORGED_DENSE = [
    (NODES, "labels", lambda a: np.full(300, 4), "labels are not all in -1 … 3"),
    (FEATURES, "x", lambda a: np.zeros((1, 5), np.float32), r"x is float32 of shape \(1,"),
]


def test_a_forged_file_reads_nothing_beyond_its_arrays(folder, other):
    for of_graph, forged in ((other, FORGED), (folder, FORGED_DENSE)):

        def attempt(file, key, change, of_graph=of_graph):
            path = of_graph / f"{file}.safetensors"
            arrays = load_file(path)
            with restored(path, of_graph / "manifest.json"):
                forge(of_graph, path.relative_to(of_graph), **{key: change(arrays[key])})
                check_folder(of_graph)

        rows = [
            (*row, rf"{row[0]}\.safetensors: .*{message}.*; copy it again, or prepare")
            for *row, message in forged
        ]
        check_refusals(rows, attempt)


def first(array, value):
    array = array.copy()
    array.flat[0] = value
    return array


UNTRAINABLE = [
    (
        OTHER,
        NODES,
        "loops",
        lambda a: a[1:].copy(),
        "00000.*: indices have other edges from a node",
    ),
    (DENSE, NODES, "labels", lambda a: np.full(300, -1), ": has no training nodes"),
    (DENSE, NODES, "split", lambda a: np.maximum(a, 1), ": has no training nodes"),
    (OTHER, NODES, "split", lambda a: np.minimum(a, 1), ": has no test nodes"),
    (DENSE, NODES, "labels", lambda a: np.where(a == 2, 1, a), r"class 2 \('2'\) has no training"),
    (DENSE, NODES, "labels", lambda a: np.maximum(a, 1), "so subtract 1 if these labels count"),
    (DENSE, NODES, "split", lambda a: np.where(a == 1, 2, a).astype("i1"), ": holds another graph"),
    (DENSE, FEATURES, "x", lambda a: first(a, np.nan), "00001.*: feature 0 of node [0-9]+ is not"),
    (
        OTHER,
        FEATURES,
        "values",
        lambda a: first(a, np.inf),
        "00001.*: feature [0-9]+ of node .* is",
    ),
]


def test_the_rules_of_graph_files_hold_in_a_folder_too(folder, other):
    def attempt(graph, file, key, change):
        of_graph = folder if graph is DENSE else other
        path = of_graph / f"{file}.safetensors"
        with restored(path, of_graph / "manifest.json"):
            forge(of_graph, path.relative_to(of_graph), **{key: change(load_file(path)[key])})
            check_folder(of_graph)

    check_refusals(UNTRAINABLE, attempt)
    table = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**table, "class_names": list("abca")}))
    with pytest.raises(InputError, match="two classes are called 'a'; give each"):
        open_folder(folder)


def test_bytes_that_are_no_safetensors_and_names_that_are_none_are_refused(folder, other):
    def attempt(folder, name, content):
        forge_bytes(folder, name, content)
        check_folder(folder)

    edges = f"{EDGES}.safetensors"
    no_arrays = rf"{edges}: is not a safetensors file of arrays; copy"
    rows = [
        (folder, edges, b"", no_arrays),
        (folder, edges, b"\x10\0\0\0\0\0\0\0" + b"{" * 40, no_arrays),
        (other, "names.json", b"{}", r"names\.json: is no list of"),
        (other, "names.json", b"[1]", r"names\.json: is no list of"),
        (other, "names.json", json.dumps([1] * 300).encode(), r"names\.json: has a name that"),
    ]
    check_refusals(rows, attempt)


WRONG = [
    ("format", "other", "is not the manifest of a prepared graph; give a folder that"),
    (
        "version",
        3,
        "has another version of the format than 1 or 2; prepare the folder with the vigpipe",
    ),
    ("nodes", 301, "part_nodes do not add up to nodes; it was changed"),
    ("edges", -1, "edges is no whole number of 0 or more"),
    ("features", 0, "kept_edges or features are out of range"),
    ("stored", 1.5, "stored is no whole number"),
    ("multi_label", 1, "multi_label is neither true nor false"),
    ("class_names", ["a", "\x1b[2J"], "class_names is no text, or has control characters"),
    ("source", 3, "source is no text"),
    ("scaling", "log", "scaling is none of raw, row, tfidf"),
    ("symmetric", None, "symmetric is neither"),
    ("partition", "best", "partition is none of"),
    ("seed", True, "seed is no whole number"),
    ("kept_edges", 1 << 40, "kept_edges or features are out of range"),
    ("seconds", -1, "seconds are no duration"),
    ("part_nodes", [0, 300], "part_nodes is no whole number of 1 or more"),
    ("graph_sha256", "z" * 64, "graph_sha256 has no SHA-256"),
    ("files", {}, "files are not those of its parts"),
]


def test_a_manifest_with_a_wrong_value_or_without_one_is_refused(folder):
    path = folder / "manifest.json"
    table = json.loads(path.read_text())

    def attempt(key, **value):
        changed = {name: old for name, old in table.items() if name != key}
        path.write_text(json.dumps({**changed, **value}))
        open_folder(folder)

    check_refusals(WRONG, lambda key, value: attempt(key, **{key: value}), where=f"{path}: ")
    absent = [(k, m if k in ("format", "version") else f"'{k}'") for k, _, m in WRONG]
    check_refusals(absent, attempt, where=f"{path}: ")


def test_files_outside_of_the_folder_are_not_read(folder):
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    table["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": "0" * 64}
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match="files are not those of its parts"):
        open_folder(folder)
