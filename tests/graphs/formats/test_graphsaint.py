"""What is wrong with the files of Reddit and of GraphSAINT is one sentence."""

import json
from functools import partial

import numpy as np

from tests.graphs.formats.raw_files import write_graphsaint, write_reddit
from tests.graphs.restored import restored
from tests.refusals import check_refusals
from vigpipe.graphs.formats import graphsaint, reddit


def change_npz(path, **arrays):
    with np.load(path) as old:
        np.savez(path, **{**old, **arrays})


TABLE = {str(node): node % 3 for node in range(40)}
ROLES = {"tr": [0, 1, 2], "va": [3], "te": [4]}
NO_TEXT = b"text"  # neither JSON nor an array
FEATURES = [
    (NO_TEXT, "does not begin as NumPy's do"),
    (np.zeros(1), r"shape \(1,\), expected \(n, d\)"),
    (np.zeros((1 << 40, 0)), "expected .n, d.: the d"),
]
ADJACENCIES = [
    ({"indices": np.arange(3)}, "does not ascend"),
    ({"indptr": np.array([0, 1]), "indices": np.array([40])}, "goes from node 0 to node 40"),
]
CLASSES = [
    (NO_TEXT, "is not the JSON it should be"),
    ([1], "is no table"),
    ({}, "classes of other nodes than 0 … 39"),
    ({"a": 1}, "its keys are no numbers of nodes"),
    ({**TABLE, "40": 1}, "classes of other nodes"),
    ({"0": [1], "1": [1, 0]}, "lists of zeros and ones"),
]
PARTS = [
    ([1], "is no table"),
    ({"tr": [0], "va": [1]}, "'te' is no list of numbers"),
    ({**ROLES, "te": []}, "'te' is no list of numbers"),
    ({**ROLES, "va": [[1], [1, 2]]}, "'va' is no list of numbers"),
    ({**ROLES, "va": [40]}, "'va' is no list of numbers"),
    ({**ROLES, "va": [2]}, "'va' has nodes of another part"),
]
OF_REDDIT = [
    ("reddit_data.npz", {"label": np.zeros((1 << 40, 0), int)}, "but features of 40"),
    ("reddit_data.npz", {"feature": np.array([{}])}, "feature holds Python objects"),
    ("reddit_graph.npz", {"row": np.array([40]), "col": np.array([0])}, "goes from node 40"),
]


def change(path, content):
    """Write other bytes, an array, other arrays of a file, or JSON."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".npz":
        change_npz(path, **content)
    else:
        path.write_text(json.dumps(content))


def check(folder, rows, read):
    def attempt(file, content):
        with restored(folder / file):
            change(folder / file, content)
            read(folder)

    check_refusals(rows, attempt, where=folder)


def test_wrong_files_of_graphsaint_are_one_sentence(tmp_path):
    rows = [
        (file, *row)
        for file, of_file in (
            ("feats.npy", FEATURES),
            ("adj_full.npz", ADJACENCIES),
            ("class_map.json", CLASSES),
            ("role.json", PARTS),
        )
        for row in of_file
    ]
    folder = write_graphsaint(tmp_path, 0, multi_label=False)
    check(folder, rows, partial(graphsaint.read, "Flickr"))


def test_wrong_files_of_reddit_are_one_sentence(tmp_path):
    check(write_reddit(tmp_path, 0), OF_REDDIT, partial(reddit.read, "Reddit"))


def test_a_node_that_is_not_in_the_table_has_no_class(tmp_path):
    folder = write_graphsaint(tmp_path, 0, multi_label=False)
    (folder / "class_map.json").write_text(json.dumps({k: v for k, v in TABLE.items() if k != "7"}))
    graph = graphsaint.read("Flickr", folder)
    assert np.flatnonzero(graph.labels == -1).tolist() == [7]
    assert graph.split[7] == -1
