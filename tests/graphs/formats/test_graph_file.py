"""Graph files are read as they were saved, and what nobody could train on is one sentence."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

from tests.graphs.partitions.small_graphs import edges_of
from tests.refusals import check_refusals
from vigpipe.graphs.formats.graph_file import read
from vigpipe.graphs.graph import UNKNOWN, symmetric

N = 10
SPLIT = np.array([0, 0, 0, 0, 0, 0, 1, 1, 2, 2], np.int8)
Y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], np.int16)
X = np.random.default_rng(0).standard_normal((N, 4))
DENSE = {
    "edge_src": np.array([3, 0, 3, 9, 3], np.uint8),
    "edge_dst": np.array([0, 1, 2, 1, 0], ">i8"),
    "x": X,
    "y": Y,
    "split": SPLIT,
}
ROWS = csr_array(random_array((N, 6), density=0.3, format="csr", rng=np.random.default_rng(1)))
SPARSE = {
    **{name: array for name, array in DENSE.items() if name != "x"},
    "x_indptr": ROWS.indptr,
    "x_indices": ROWS.indices.astype(np.int16),
    "x_data": ROWS.data,
    "x_shape": np.array(ROWS.shape),
}
assert (ROWS.nonzero()[0][3], ROWS.nonzero()[1][3]) == (2, 1)
MANY = np.eye(3, dtype=bool)[Y] | (np.arange(N)[:, None] == 4)


@pytest.fixture
def save(tmp_path):
    def save(arrays, write=np.savez):
        path = tmp_path / "graph.npz"
        write(path, **{name: a for name, a in arrays.items() if a is not None})
        return path

    return save


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_dense_features(save, write):
    path = save({**DENSE, "names": np.array(["any"] * N)}, write)
    graph = read(path)
    assert graph.name == str(path)
    assert graph.indptr.tolist() == [0, 1, 3, 4, 4, 4, 4, 4, 4, 4, 4]  # the edge 3 → 0 once
    assert graph.sources().tolist() == [3, 0, 9, 3]
    assert isinstance(graph.features, np.ndarray)
    np.testing.assert_array_equal(graph.features, X.astype(np.float32))
    np.testing.assert_array_equal(graph.labels, Y)
    np.testing.assert_array_equal(graph.split, SPLIT)
    kinds = [a.dtype for a in (graph.indptr, graph.indices, graph.features, graph.labels)]
    assert kinds == [np.int64, np.int64, np.float32, np.int64]
    assert graph.split.dtype == np.int8
    assert graph.class_names == ("0", "1", "2")
    assert graph.node_names == ("any",) * N
    unsigned = {name: DENSE[name].astype(np.uint64) for name in ("edge_src", "edge_dst")}
    assert read(save({**DENSE, **unsigned}, write)).sha256 == graph.sha256
    nothing = {"edge_src": np.zeros(0, int), "edge_dst": np.zeros(0, int)}
    graph = read(save({**DENSE, **nothing}))
    assert (graph.num_edges, graph.node_names) == (0, None)


def test_weights_of_edges(save):
    assert DENSE["edge_src"].tolist() == [3, 0, 3, 9, 3]
    weights = np.array([1, 2, 4, 8, 16])
    graph = read(save({**DENSE, "edge_weight": weights}))
    assert graph.edge_weights is not None
    assert graph.edge_weights.dtype == np.float32
    found = weights_of(graph)
    assert found == {(3, 0): 1 + 16, (0, 1): 2, (9, 1): 8, (3, 2): 4}  # of repeated edges, added
    both = symmetric(graph)
    assert weights_of(both) == {(v, u): w for (u, v), w in found.items()} | found
    one_way = replace(both, edge_weights=np.arange(1, both.num_edges + 1, dtype=np.float32))
    assert symmetric(one_way) is one_way
    others = [read(save(DENSE)), read(save({**DENSE, "edge_weight": weights + 1})), both, one_way]
    assert len({graph.sha256, *(other.sha256 for other in others)}) == 5


def weights_of(graph):
    return dict(zip(edges_of(graph), graph.weights_of(slice(None)).tolist(), strict=True))


def test_what_torch_geometric_calls_edge_index_and_masks_is_understood(save):
    masks = dict(
        zip(("train_mask", "val_mask", "test_mask"), SPLIT == [[0], [1], [2]], strict=True)
    )
    edges = np.stack((DENSE["edge_src"], DENSE["edge_dst"]))
    named = {"edge_src": None, "edge_dst": None, "edge_index": edges, "split": None, **masks}
    assert read(save({**DENSE, **named})).sha256 == read(save(DENSE)).sha256


def test_sparse_features(save):
    rows = ROWS.toarray().astype(np.float32)
    for change, num_features, expected in (
        ({}, 6, rows),
        ({"x_shape": None}, int(ROWS.indices.max()) + 1, rows),
        ({"x_shape": None, "num_features": np.array(8)}, 8, rows),
        ({"num_features": np.array([6])}, 6, rows),
        ({"x_data": None}, 6, rows != 0),  # ones where no numbers are stored
    ):
        graph = read(save({**SPARSE, **change}))
        assert isinstance(graph.features, csr_array)
        assert graph.features.dtype == np.float32
        assert graph.num_features == num_features
        np.testing.assert_array_equal(graph.features.toarray()[:, :5], expected[:, :5])


def test_numbers_of_one_place_are_added_and_zeros_left_out(save):
    rows = {
        "x_indptr": np.array([0, 3, *[4] * (N - 1)]),
        "x_indices": np.array([2, 0, 2, 1]),
        "x_data": np.array([1, 5, 2, 0]),
    }
    features = read(save({**SPARSE, **rows})).features
    assert isinstance(features, csr_array)
    assert features.data.tolist() == [5, 3]
    assert features.indices.tolist() == [0, 2]


def test_a_class_a_node_is_read_from_numbers_names_and_zeros_and_ones(save):
    letters = np.array(list("cab"))[Y]
    some = put(Y, [2, 8], -1)
    of_some = {"y": np.eye(4)[some][:, :3], "split": np.where(some < 0, -1, SPLIT)}
    for change, labels, names in (
        ({"y": Y / 1}, Y, "012"),
        ({"y": Y[:, None]}, Y, "012"),
        ({"y": Y == 1}, Y == 1, "01"),
        ({"y": letters}, np.array([2, 0, 1])[Y], "abc"),
        ({"y": letters.astype(bytes), "classes": np.array(list("cab"))}, Y, "cab"),
        ({"y": np.eye(3)[Y], "classes": np.array(list("cab"))}, Y, "cab"),
        (of_some, some, "012"),
    ):
        graph = read(save({**DENSE, **change}))
        np.testing.assert_array_equal(graph.labels, labels)
        assert graph.labels.dtype == np.int64
        assert graph.class_names == tuple(names)
        assert len(graph.notes) == (change["y"].shape[1:] == (3,))
    assert read(save({**DENSE, "split": SPLIT / 1})).sha256 == read(save(DENSE)).sha256


def test_a_node_may_have_several_classes(save):
    one_hot = read(save({**DENSE, "y": np.eye(3)[Y]}), multi_label=True)
    np.testing.assert_array_equal(one_hot.labels, np.eye(3, dtype=bool)[Y])
    assert not one_hot.notes
    graph = read(save({**DENSE, "y": MANY.astype(int), "classes": np.array(["a", "b", "c"])}))
    assert graph.is_multi_label
    assert graph.labels.dtype == np.int8
    np.testing.assert_array_equal(graph.labels, MANY)
    np.testing.assert_array_equal(graph.split, SPLIT)
    assert graph.class_names == ("a", "b", "c")


def test_of_several_classes_some_may_be_unknown(save):
    labels = np.eye(3)[Y]
    labels[0, 1], labels[4], labels[5, 0] = -1, np.nan, np.nan
    graph = read(save({**DENSE, "y": labels}))
    assert graph.is_multi_label  # though what is known would fit one class a node
    np.testing.assert_array_equal(graph.labels, np.where(np.isnan(labels), UNKNOWN, labels))
    np.testing.assert_array_equal(graph.split, put(SPLIT, 4, -1))  # of it nothing is known
    as_numbers = np.where(np.isnan(labels), -1, labels).astype(int)
    assert read(save({**DENSE, "y": as_numbers})).sha256 == graph.sha256
    assert graph.notes == ()
    labels[:6, 2] = np.nan
    (note,) = read(save({**DENSE, "y": labels})).notes
    assert "of no training node is it known whether it has 2, so what is predicted" in note
    assert read(save({**DENSE, "y": labels}), trains=False).notes == ()


def test_a_node_without_a_class_is_in_no_part_of_the_split(save):
    labels = Y.copy()
    labels[[2, 8]] = -1
    graph = read(save({**DENSE, "y": labels}))
    np.testing.assert_array_equal(graph.labels, labels)
    np.testing.assert_array_equal(graph.split, [0, 0, -1, 0, 0, 0, 1, 1, -1, 2])


def put(array, place, value, dtype=None):
    array = array.astype(dtype or array.dtype)
    array[place] = value
    return array


FAR = np.array([3, 0, 3, 9, N])
DENSE_WRONG = [
    ({"edge_src": None}, r"has the arrays edge_dst, split, x, y, but lacks edge_src"),
    ({"edge_src": FAR}, "edge 4 goes from node 10 to node 0, but with 10"),
    ({"edge_src": FAR[:-1]}, r"shape \(4,\) and int64 of shape \(5,\), expected"),
    ({"edge_src": FAR / 2}, "its edges are float64"),
    ({"x": None}, "of the arrays x, x_indptr and x_indices it has none of them"),
    ({"x": put(X, (7, 2), np.nan)}, "feature 2 of node 7 is not a finite number"),
    ({"x": put(X, (1, 3), 1e39)}, "feature 3 of node 1 is not a finite number"),
    ({"x": X.astype(str)}, r"features are <U\d+ of shape"),
    ({"x": X[:, :0]}, r"shape \(10, 0\)"),
    ({"x": X[1:]}, "labels of 10 nodes, but features of 9; save all"),
    ({"split": SPLIT[1:]}, "labels of 10 nodes, but split of 9"),
    ({"x": X[:0], "y": Y[:0], "split": SPLIT[:0]}, "has no nodes, expected at least"),
    ({"y": put(Y / 1, 4, np.nan)}, "float64, and that of node 4 is nan, expected the number of"),
    ({"y": put(Y / 1, 2, 0.5)}, r"node 2 is 0.5, .* or -1 for none, .*; save them so"),
    ({"y": np.array(["a", "b"] * 5), "classes": np.array(["a", "c"])}, "class 'b', which is none"),
    ({"y": np.full(N, b"\xff")}, "bytes that are no UTF-8"),
    ({"y": Y + 1}, r"class 0 \('0'\) has no training nodes; classes count from 0, so subtract 1"),
    ({"y": Y + 1, "classes": np.array(list("abc"))}, "names 3; classes count from 0, so subtract"),
    ({"edge_src": put(FAR, 0, 1 << 63, np.uint64)}, "edge 0 goes from node 9223372036854775808"),
    ({"edge_weight": put(np.ones(5), 1, 0)}, "edge 1 has the weight 0.0, expected 1e-30 … 1e.30;"),
    ({"edge_weight": put(np.ones(5), 4, 1e39)}, r"edge 4 has the weight 1e\+39, expected 1e-30 …"),
    (
        {"edge_weight": put(np.ones(5), 0, np.nan)},
        "edge 0 has the weight nan, expected 1e-30 …",
    ),
    (
        {"edge_weight": np.ones(4)},
        r"are float64 of shape \(4,\), expected a number for each of the 5",
    ),
    ({"edge_weight": np.ones((5, 1))}, r"of shape \(5, 1\), expected a number .* shape \(5,\)"),
    (
        {"edge_weight": np.full(5, 9e29)},
        "weights of repeated edges add up to more than 1e.30",
    ),
    ({"edge_attr": X[:5]}, "has edge_attr, but edges have no types or features here; save one"),
    (
        {"train_mask": SPLIT == 0},
        r"train_mask have the shapes \(10,\), .* and no split",
    ),
    (
        {"edge_index": np.stack([Y, Y])},
        r"edge_index has the shape \(2, 10\), .* no edge_src",
    ),
    (
        {"split": None},
        "has no split; vigpipe dataset import --data .* --test 0.2 OUT.npz",
    ),
    ({"columns": np.array(["[]"])}, "its columns are not what an import writes"),
    (
        {"columns": np.array(['[{"name": "a", "values": ["b"]}]'])},
        "its columns make 1 features",
    ),
    ({"class\x1b": Y}, r"has class\\x1b, expected none but edge_src, .*; rename what was meant"),
    (
        {"x_shape": np.array([N, 5])},
        "x_shape is 10 × 5, but by its other arrays it would be 10 × 4",
    ),
    ({"num_features": np.array(3)}, "num_features is 3, but by its other arrays it would be 4"),
    ({"y": put(Y, 4, -2)}, "node 4 has the label -2, but classes count from 0"),
    ({"y": put(Y, 0, 1 << 63, np.uint64)}, "has the label 9223372036854775808"),
    ({"y": put(Y, 9, 3)}, r"class 3 \('3'\) has no training nodes"),
    ({"classes": np.array(list("abcd"))}, r"class 3 \('d'\) has no training"),
    ({"split": SPLIT % 2}, "has no test nodes .* mark some with 2"),
    ({"y": Y * 0 - 1}, "has no training nodes"),
    ({"split": put(SPLIT, 5, 3)}, "the split of node 5 is 3, expected 0 for train"),
    ({"split": SPLIT == 0}, "its split is bool of shape .*: 0 for training, .*; save them so"),
    ({"split": SPLIT / 2}, "its split is float64 of shape"),
    ({"classes": np.array(["a", "b"])}, "of 3 classes, but it names 2; name every"),
    ({"classes": np.array(["a", "b", "a"])}, "two classes are called 'a'"),
    ({"classes": np.array(["a", "b\n", "c"])}, r"class 1, 'b\\n', is empty"),
    ({"classes": np.arange(3)}, r"classes has int64 of shape \(3,\), expected"),
    ({"y": MANY * 2}, r"int64 of shape \(10, 3\), expected zeros and ones"),
    ({"y": MANY[:, :0]}, r"shape \(10, 0\), expected zeros and ones"),
    ({"y": MANY, "classes": np.array(list("abcd"))}, "of 3 classes, but it names 4"),
    ({name: SPARSE[name] for name in ("x_indptr", "x_indices")}, "it has x, x_indptr, x_i"),
    ({"names": np.array(["a"] * (N - 1))}, r"names has .*, expected one text for each of the 10"),
    ({"names": np.arange(N)}, r"names has .*, expected one text for each of the 10"),
]
SPARSE_WRONG = [
    ({"x_indptr": None}, "it has x_indices; save dense features as x, or sparse"),
    ({"x_indptr": ROWS.indptr[:-1]}, r"the shape \(10,\) and .* expected \(11,\)"),
    ({"x_indptr": put(ROWS.indptr, 4, 99)}, "does not ascend from 0 to"),
    ({"x_indptr": ROWS.indptr / 1}, "have float64 and int16, expected whole"),
    ({"x_indices": ROWS.indices + 1}, "x_indices lie in .* 6, but with 6"),
    ({"x_indices": ROWS.indices - 1}, "x_indices lie in -1 … "),
    ({"x_data": ROWS.data[1:]}, "expected a number for each of the 18 x_indices"),
    ({"x_data": put(ROWS.data, 3, np.inf)}, "feature 1 of node 2 is not a finite number"),
    ({"num_features": 1 << 40, "x_shape": None}, "has 1099511627776 feature"),
    ({"num_features": np.ones(2, int), "x_shape": None}, "expected 1 whole number"),
    ({"x_shape": np.ones(2)}, "x_shape has float64 of shape .2,., expect"),
    ({"x_shape": np.array([-1, 6])}, "x_shape is -1 × 6, but by its other arrays it would be 10 ×"),
    ({"num_features": np.array(7)}, "x_shape is 10 × 6, but by .* it would be 10 × 7; correct it"),
]


def test_what_nobody_could_train_on_is_one_sentence(tmp_path):
    path = tmp_path / "graph.npz"

    def attempt(arrays, change):
        changed = {**arrays, **change}
        np.savez(path, **{name: array for name, array in changed.items() if array is not None})
        read(path)

    check_refusals([(DENSE, *row) for row in DENSE_WRONG], attempt, where=f"{path}: ")
    check_refusals([(SPARSE, *row) for row in SPARSE_WRONG], attempt, where=f"{path}: ")
