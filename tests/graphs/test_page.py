"""What docs/graph-data.md shows is a graph that can be opened."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.world import ROOT
from vigpipe.graphs.sources import open_graph

PAGE = (ROOT / "docs" / "graph-data.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def opened(data):
    return open_graph(data, data_dir=Path(), download=False, features="raw", symmetric=True, seed=0)


def test_the_example_of_a_graph_file():
    exec(SNIPPETS[0], {})
    graph = opened("graph.npz")
    assert graph.class_names == ("cat", "dog")
    assert (graph.num_nodes, graph.num_edges) == (4, 8)


def test_the_files_of_the_open_graph_benchmark():
    features = np.random.default_rng(0).random((6, 2))
    for name, numbers in {
        "raw/node-label": np.array([[0], [1], [2], [0], [1], [2]]),
        "raw/edge": np.array([[0, 1], [2, 3], [4, 5]]),
        "raw/node-feat": features,
        "split/time/train": np.array([[0], [4], [2]]),
        "split/time/valid": np.array([[1], [3]]),
        "split/time/test": np.array([[5], [5]]),
    }.items():
        path = Path("arxiv", f"{name}.csv.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, numbers, fmt="%.9g", delimiter=",")
    exec(SNIPPETS[1], {})
    graph = opened("arxiv.npz")
    assert graph.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert graph.split.tolist() == [0, 1, 0, 1, 0, 2]
    assert isinstance(graph.features, np.ndarray)
    np.testing.assert_allclose(graph.features, features, rtol=1e-6)
    assert graph.indices.tolist() == [1, 0, 3, 2, 5, 4]
    assert len(SNIPPETS) == 2


def test_the_random_graph():
    name = re.search(r"`(sbm:[\d,]+)`", PAGE)
    assert name is not None
    assert opened(name[1].replace("10000", "1000")).num_features == 64
