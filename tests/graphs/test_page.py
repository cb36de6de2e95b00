"""What docs/graph-data.md shows is a graph that can be opened."""

import re
from pathlib import Path

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
    assert len(SNIPPETS) == 1


def test_the_random_graph():
    name = re.search(r"`(sbm:[\d,]+)` draws", PAGE)
    assert name is not None
    assert opened(name[1].replace("10000", "1000")).num_features == 64
