import numpy as np
import pytest

from tests.refusals import check_refusals
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION
from vigpipe.graphs.sbm import draw


def targets(graph):
    return np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("sbm:3003", (3003, 10, 64)),
        ("sbm:3003,7,5,20", (3003, 7, 5)),
        ("sbm:5,1,1,1", (5, 1, 1)),
    ],
)
def test_it_has_the_sizes_that_were_asked_for(name, sizes):
    graph = draw(name, 0)
    assert graph.name == name
    assert (graph.num_nodes, graph.num_classes, graph.num_features) == sizes
    assert graph.features.dtype == np.float32
    assert graph.split.dtype == np.int8
    counts = np.bincount(graph.labels)
    assert counts.max() - counts.min() <= 1
    for label in range(graph.num_classes):
        parts = np.bincount(graph.split[graph.labels == label])
        assert parts.argmax() == TRAIN
        assert abs(parts[TRAIN] - 3 * parts[VALIDATION]) <= 3
        assert abs(parts[VALIDATION] - parts[TEST]) <= 1


def test_it_is_undirected_without_loops_and_joins_classes():
    graph = draw("sbm:3000,10,8,20", 1)
    ends = np.stack((graph.indices, targets(graph)))
    assert (ends[0] != ends[1]).all()
    order = np.lexsort(ends[::-1])
    np.testing.assert_array_equal(ends[:, order], ends[::-1][:, np.lexsort(ends)])
    assert 0.95 * 20 < graph.num_edges / graph.num_nodes <= 20
    within = (graph.labels[ends[0]] == graph.labels[ends[1]]).mean()
    assert 0.79 < within < 0.85  # four of five on purpose, and a tenth of the others


def test_the_seed_says_which():
    graphs = [draw("sbm:200", seed) for seed in (0, 0, 1)]
    assert graphs[0].sha256 == graphs[1].sha256 != graphs[2].sha256
    np.testing.assert_array_equal(graphs[0].features, graphs[1].features)


def test_another_form_or_size_is_one_sentence():
    forms = ["", "ten", "100,", "-100", "100,2,3,4,5", "²", "9" * 5000]
    rows = [
        (f"sbm:{forms[0]}", r"expected whole numbers as sbm:NODES\[,CLASSES"),
        *((f"sbm:{form}", "expected whole numbers") for form in forms),
        ("sbm:100,0", "every number is at least 1"),
        ("sbm:100,30", "a class has at least 5 nodes .got 100 nodes in 30 classes"),
        ("sbm:100000000,10,64", "at most 2147483648; choose smaller numbers"),
        ("sbm:1000000,10,1,9999", "at most 2147483648; choose smaller numbers"),
    ]
    rows = [(name, f"^--data {name.split('9999')[0]}.*{message}") for name, message in rows]
    check_refusals(rows, lambda name: draw(name, 0))
