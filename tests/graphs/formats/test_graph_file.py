"""Graph files are read as they were saved, and what nobody could train on is one sentence."""

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

from vigpipe.errors import InputError
from vigpipe.graphs.formats.graph_file import read

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


@pytest.fixture(params=[np.savez, np.savez_compressed])
def save(request, tmp_path):
    def save(arrays):
        path = tmp_path / "graph.npz"
        request.param(path, **{name: a for name, a in arrays.items() if a is not None})
        return path

    return save


def test_dense_features(save):
    path = save({**DENSE, "names": np.array(["any"] * N), "other": np.array([{}])})
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
    assert read(save(DENSE)).node_names is None


@pytest.mark.parametrize(
    ("change", "num_features"),
    [
        ({}, 6),
        ({"x_shape": None}, int(ROWS.indices.max()) + 1),
        ({"x_shape": None, "num_features": np.array(8)}, 8),
    ],
)
def test_sparse_features(change, num_features, save):
    graph = read(save({**SPARSE, **change}))
    assert isinstance(graph.features, csr_array)
    assert graph.features.dtype == np.float32
    assert graph.num_features == num_features
    np.testing.assert_array_equal(
        graph.features.toarray()[:, :5], ROWS.toarray().astype(np.float32)[:, :5]
    )


def test_sparse_features_are_ones_where_no_numbers_are_stored(save):
    graph = read(save({**SPARSE, "x_data": None}))
    assert isinstance(graph.features, csr_array)
    np.testing.assert_array_equal(graph.features.toarray(), ROWS.toarray() != 0)


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


def test_a_node_may_have_several_classes(save):
    for labels in (MANY, MANY.astype(np.int64)):
        graph = read(save({**DENSE, "y": labels, "classes": np.array(["a", "b", "c"])}))
        assert graph.is_multi_label
        assert graph.labels.dtype == bool
        np.testing.assert_array_equal(graph.labels, MANY)
        np.testing.assert_array_equal(graph.split, SPLIT)
        assert graph.class_names == ("a", "b", "c")


def test_a_node_without_a_class_is_in_no_part_of_the_split(save):
    labels = Y.copy()
    labels[[2, 8]] = -1
    graph = read(save({**DENSE, "y": labels}))
    np.testing.assert_array_equal(graph.labels, labels)
    np.testing.assert_array_equal(graph.split, [0, 0, -1, 0, 0, 0, 1, 1, -1, 2])


def test_a_graph_may_have_no_edges(save):
    graph = read(save({**DENSE, "edge_src": np.zeros(0, int), "edge_dst": np.zeros(0, int)}))
    assert graph.num_edges == 0
    assert graph.indptr.tolist() == [0] * (N + 1)


# ---- what is refused ------------------------------------------------------------------------


def put(array, place, value, dtype=None):
    array = array.astype(dtype or array.dtype)
    array[place] = value
    return array


FAR = np.array([3, 0, 3, 9, N])
DENSE_WRONG = {
    "no edges": ({"edge_src": None}, r"has the arrays edge_dst, split, x, y, but lacks edge_src"),
    "an edge from nowhere": ({"edge_src": FAR}, "edge 4 goes from node 10 to node 0, but with 10"),
    "an edge to nowhere": ({"edge_dst": FAR - 1}, "edge 1 goes from node 0 to node -1, but"),
    "half an edge": ({"edge_src": FAR[:-1]}, r"shape \(4,\) and int64 of shape \(5,\), expected"),
    "edges of fractions": ({"edge_src": FAR / 2}, "its edges are float64"),
    "pairs": ({"edge_src": FAR[None], "edge_dst": FAR[None]}, r"expected whole .* shape \(e,\)"),
    "no features": ({"x": None}, "of the arrays x, x_indptr and x_indices it has none of them"),
    "not a number": ({"x": put(X, (7, 2), np.nan)}, "feature 2 of node 7 is not a finite number"),
    "too large": ({"x": put(X, (1, 3), 1e39)}, "feature 3 of node 1 is not a finite number"),
    "features of text": ({"x": X.astype(str)}, r"features are <U\d+ of shape"),
    "one feature": ({"x": X[:, 0]}, r"shape \(10,\), expected numbers of shape \(n, d\)"),
    "no feature": ({"x": X[:, :0]}, r"shape \(10, 0\)"),
    "a scalar": ({"x": np.array(1.0)}, "but features of 0"),
    "fewer features": ({"x": X[1:]}, "labels of 10 nodes, but features of 9; save all"),
    "fewer splits": ({"split": SPLIT[1:]}, "labels of 10 nodes, but split of 9"),
    "no nodes": ({"x": X[:0], "y": Y[:0], "split": SPLIT[:0]}, "has no nodes, expected at least"),
    "one label": ({"y": np.array(1)}, "has no nodes"),
    "labels of fractions": ({"y": Y / 1}, "labels are float64 of shape"),
    "a label below": ({"y": put(Y, 4, -2)}, "node 4 has the label -2, but classes count from 0"),
    "a label beyond": ({"y": put(Y, 4, 10)}, "node 4 has the label 10"),
    "a label far beyond": (
        {"y": put(Y, 0, 1 << 63, np.uint64)},
        "has the label 9223372036854775808",
    ),
    "a class of nobody": ({"y": put(Y, 0, 4)}, r"class 3 \('3'\) has no training nodes; put"),
    "a class to test": ({"y": put(Y, 9, 3)}, r"class 3 \('3'\) has no training nodes"),
    "a name of nobody": ({"classes": np.array(list("abcd"))}, r"class 3 \('d'\) has no training"),
    "no training": ({"split": SPLIT + (SPLIT == 0)}, "has no training nodes .*some with 0 in its"),
    "no test": ({"split": SPLIT % 2}, "has no test nodes .* mark some with 2"),
    "a test without class": ({"y": put(Y, [8, 9], -1)}, "has no test nodes"),
    "nobody has a class": ({"y": Y * 0 - 1}, "has no training nodes"),
    "another split": (
        {"split": put(SPLIT, 5, 3)},
        "the split of node 5 is 3, expected 0 for train",
    ),
    "split of truth": ({"split": SPLIT == 0}, "its split is bool of shape"),
    "too few names": (
        {"classes": np.array(["a", "b"])},
        "of 3 classes, but it names 2; name every",
    ),
    "a name twice": ({"classes": np.array(["a", "b", "a"])}, "two classes are called 'a'"),
    "a name that forges": ({"classes": np.array(["a", "b\n", "c"])}, r"class 1, 'b\\n', is empty"),
    "numbers for names": (
        {"classes": np.arange(3)},
        r"classes has int64 of shape \(3,\), expected",
    ),
    "names as objects": ({"classes": np.array(["a"], object)}, "classes holds Python objects"),
    "several and other": ({"y": MANY * 2}, r"int64 of shape \(10, 3\), expected zeros and ones"),
    "chances": ({"y": MANY / 2}, r"float64 of shape \(10, 3\), expected zeros and ones"),
    "no classes": ({"y": MANY[:, :0]}, r"shape \(10, 0\), expected zeros and ones"),
    "a name too many": (
        {"y": MANY, "classes": np.array(list("abcd"))},
        "labels are of 3 classes, but it names 4",
    ),
    "both": ({name: SPARSE[name] for name in ("x_indptr", "x_indices")}, "it has x, x_indptr, x_i"),
}
SPARSE_WRONG = {
    "half a matrix": ({"x_indptr": None}, "it has x_indices; save dense features as x, or sparse"),
    "fewer rows": ({"x_indptr": ROWS.indptr[:-1]}, r"the shape \(10,\) and .* expected \(11,\)"),
    "descending": ({"x_indptr": put(ROWS.indptr, 4, 99)}, "does not ascend from 0 to"),
    "another start": ({"x_indptr": put(ROWS.indptr, 0, 1)}, "does not ascend from 0 to"),
    "another end": ({"x_indptr": put(ROWS.indptr, N, 99)}, "does not ascend from 0 to"),
    "broken pointers": ({"x_indptr": ROWS.indptr / 1}, "have float64 and int16, expected whole"),
    "a column beyond": ({"x_indices": ROWS.indices + 1}, "x_indices lie in .* 6, but with 6"),
    "a column below": ({"x_indices": ROWS.indices - 1}, "x_indices lie in -1 … "),
    "fewer numbers": ({"x_data": ROWS.data[1:]}, "expected a number for each of the 18 x_indices"),
    "words": ({"x_data": ROWS.data.astype(str)}, "x_data has <U"),
    "no number": (
        {"x_data": put(ROWS.data, 3, np.inf)},
        "feature 1 of node 2 is not a finite number",
    ),
    "a column far beyond": (
        {"num_features": 1 << 40, "x_shape": None},
        "has 1099511627776 feature",
    ),
    "columns below 0": ({"num_features": -1, "x_shape": None}, "has -1 features of a node, expect"),
    "two numbers": ({"num_features": np.ones(2, int), "x_shape": None}, "expected 1 whole number"),
    "a shape of fractions": ({"x_shape": np.ones(2)}, "x_shape has float64 of shape .2,., expect"),
}


@pytest.mark.parametrize(
    ("arrays", "change", "message"),
    [
        *(pytest.param(DENSE, *wrong, id=name) for name, wrong in DENSE_WRONG.items()),
        *(pytest.param(SPARSE, *wrong, id=name) for name, wrong in SPARSE_WRONG.items()),
    ],
)
def test_what_nobody_could_train_on_is_one_sentence(arrays, change, message, tmp_path):
    path = tmp_path / "graph.npz"
    wrong = {**arrays, **change}
    np.savez(path, **{name: array for name, array in wrong.items() if array is not None})
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [np.array(["a"] * (N - 1)), np.arange(N), np.array("a")])
def test_names_that_are_not_one_for_each_node_are_refused(names, save):
    with pytest.raises(InputError, match=r"names has .*, expected one text for each of the 10"):
        read(save({**DENSE, "names": names}))
