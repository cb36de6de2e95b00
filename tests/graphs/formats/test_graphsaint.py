"""What is wrong with the files of Reddit and of GraphSAINT is one sentence."""

import json

import numpy as np
import pytest

from tests.graphs.formats.raw_files import write_graphsaint, write_reddit
from vigpipe.errors import InputError
from vigpipe.graphs.formats import graphsaint, reddit


def change_npz(path, **arrays):
    with np.load(path) as old:
        np.savez(path, **{**old, **arrays})


def write(text):
    return lambda path: path.write_text(text)


def write_json(content):
    return write(json.dumps(content))


TABLE = {str(node): node % 3 for node in range(40)}
ROLES = {"tr": [0, 1, 2], "va": [3], "te": [4]}
WRONG = {
    "feats.npy": {
        "text": (write("text"), "does not begin as NumPy's do"),
        "no width": (lambda path: np.save(path, np.zeros(1)), r"shape \(1,\), expected \(n, d\)"),
        "nothing": (lambda path: np.save(path, np.zeros((1 << 40, 0))), "expected .n, d.: the d"),
        "fewer nodes": (lambda path: np.save(path, np.zeros((39, 2))), "classes of other nodes"),
        "no number": (lambda path: np.save(path, np.full((40, 2), np.nan)), "is not a finite"),
    },
    "adj_full.npz": {
        "another end": (lambda path: change_npz(path, indices=np.arange(3)), "does not ascend"),
        "no rows": (lambda path: change_npz(path, indptr=np.zeros(0, int)), "does not ascend"),
        "broken rows": (lambda path: change_npz(path, indptr=np.zeros(41)), "does not ascend"),
        "another node": (
            lambda path: change_npz(path, indptr=np.array([0, 1]), indices=np.array([40])),
            "edge 0 goes from node 0 to node 40",
        ),
        "another row": (
            lambda path: change_npz(path, indptr=np.eye(42, dtype=int)[41], indices=np.array([0])),
            "edge 0 goes from node 40 to node 0",
        ),
    },
    "class_map.json": {
        "text": (write("text"), "is not the JSON it should be"),
        "a list": (write_json([1]), "is no table"),
        "nothing": (write_json({}), "classes of other nodes than 0 … 39"),
        "a key that is none": (write_json({"a": 1}), "its keys are no numbers of nodes"),
        "a long key": (write_json({"9" * 30: 1}), "its keys are no numbers of nodes"),
        "another node": (write_json({**TABLE, "40": 1}), "classes of other nodes"),
        "a node below": (write_json({**TABLE, "-1": 1}), "classes of other nodes"),
        "lists of many lengths": (write_json({"0": [1], "1": [1, 0]}), "lists of zeros and ones"),
        "broken classes": (write_json(dict.fromkeys(TABLE, 0.5)), "labels are float64"),
        "words": (write_json(dict.fromkeys(TABLE, "a")), "labels are <U1"),
        "lists in lists": (write_json({key: [[1]] for key in TABLE}), r"shape \(40, 1, 1\)"),
        "a gap": (write_json({**TABLE, "0": 4}), r"class 3 \('3'\) has no training nodes"),
    },
    "role.json": {
        "a list": (write_json([1]), "is no table"),
        "no test": (write_json({"tr": [0], "va": [1]}), "'te' is no list of numbers"),
        "nobody": (write_json({**ROLES, "te": []}), "'te' is no list of numbers"),
        "words": (write_json({**ROLES, "va": ["a"]}), "'va' is no list of numbers"),
        "lists": (write_json({**ROLES, "va": [[1], [1, 2]]}), "'va' is no list of numbers"),
        "another node": (write_json({**ROLES, "va": [40]}), "'va' is no list of numbers"),
        "a node below": (write_json({**ROLES, "va": [-1]}), "'va' is no list of numbers"),
        "a node twice": (write_json({**ROLES, "va": [2]}), "'va' has nodes of another part"),
    },
}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        pytest.param(file, *wrong, id=f"{file}: {kind}")
        for file, kinds in WRONG.items()
        for kind, wrong in kinds.items()
    ],
)
def test_files_of_graphsaint(file, change, message, tmp_path):
    folder = write_graphsaint(tmp_path, 0, multi_label=False)
    change(folder / file)
    with pytest.raises(InputError, match=message) as caught:
        graphsaint.read("Flickr", folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_a_node_that_is_not_in_the_table_has_no_class(tmp_path):
    folder = write_graphsaint(tmp_path, 0, multi_label=False)
    (folder / "class_map.json").write_text(json.dumps({k: v for k, v in TABLE.items() if k != "7"}))
    graph = graphsaint.read("Flickr", folder)
    assert np.flatnonzero(graph.labels == -1).tolist() == [7]
    assert graph.split[7] == -1


@pytest.mark.parametrize(
    ("file", "arrays", "message"),
    [
        ("reddit_data.npz", {"node_types": np.zeros(40, int)}, "has no training nodes"),
        ("reddit_data.npz", {"node_types": np.ones(39, int)}, "but split of 39"),
        ("reddit_data.npz", {"label": np.zeros((1 << 40, 0), int)}, "but features of 40"),
        ("reddit_data.npz", {"feature": np.array([{}])}, "feature holds Python objects"),
        ("reddit_graph.npz", {"row": np.array([40]), "col": np.array([0])}, "goes from node 40"),
    ],
)
def test_files_of_reddit(file, arrays, message, tmp_path):
    folder = write_reddit(tmp_path, 0)
    change_npz(folder / file, **arrays)
    with pytest.raises(InputError, match=message):
        reddit.read("Reddit", folder)
