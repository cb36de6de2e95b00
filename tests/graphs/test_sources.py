"""Which graph a word stands for, and who fetches what is not there."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.graphs.formats.raw_files import planetoid_parts, write_graphsaint, write_planetoid
from tests.refusals import check_refusals
from vigpipe.graphs.features import in_memory
from vigpipe.graphs.graph import symmetric
from vigpipe.graphs.sources import open_graph


def opened(data, data_dir=Path("data"), **options: Any):
    options = {"download": False, "features": "raw", "symmetric": False, "seed": 0, **options}
    return open_graph(data, data_dir=data_dir, **options)


def test_a_file_a_name_and_a_draw(tmp_path, monkeypatch):
    write_planetoid(tmp_path, "Cora", planetoid_parts(0))
    assert opened("cORA", tmp_path).name == "Cora"
    assert opened("sbm:100,2", seed=1).sha256 == opened("sbm:100,2", seed=1).sha256
    graph = opened("sbm:100,2")
    assert isinstance(graph.features, np.ndarray)
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(
        tmp_path / "cora.npz",
        edge_src=graph.indices,
        edge_dst=np.repeat(np.arange(100), np.diff(graph.indptr)),
        x=graph.features,
        y=graph.labels,
        split=graph.split,
    )
    again = opened("~/cora.npz")
    assert again.sha256 == graph.sha256
    np.testing.assert_array_equal(again.features, graph.features)


def test_features_are_scaled_and_edges_added_on_request(tmp_path):
    write_graphsaint(tmp_path / "Flickr", 0, multi_label=False)
    path = tmp_path / "Flickr" / "raw" / "feats.npy"
    np.save(path, np.abs(np.load(path)))
    graph = opened("flickr", tmp_path)
    other = opened("flickr", tmp_path, features="row", symmetric=True)
    np.testing.assert_allclose(in_memory(other.features).sum(axis=1), 1, rtol=1e-6)
    assert in_memory(graph.features).sum(axis=1).std() > 0.1
    assert other.num_edges > graph.num_edges
    np.testing.assert_array_equal(other.indices, symmetric(graph).indices)
    np.testing.assert_array_equal(other.indptr, symmetric(graph).indptr)
    assert other.sha256 != graph.sha256


def test_several_classes_a_node_are_asked_for(tmp_path):
    graph, path = opened("sbm:30,2,4"), tmp_path / "graph.npz"
    arrays: dict[str, Any] = {"x": graph.features, "split": graph.split}
    arrays |= {"edge_src": [0], "edge_dst": [1]}
    np.savez(path, **arrays, y=np.eye(2)[graph.labels])
    assert opened(str(path), multi_label=True).is_multi_label
    (note,) = opened(str(path)).notes
    assert note.endswith(
        "give each node one class, and are read so; if a node may have several, add --multi-label"
    )
    np.savez(path, **arrays, y=graph.labels)
    words = "has one class a node, but --multi-label, or a model of .* needs zeros and ones"
    attempt = partial(opened, multi_label=True)
    check_refusals([(str(path), words), ("sbm:30,2,4", words)], attempt, "^--data .*: ")


def test_another_word_lists_what_there_is():
    names = "Cora, CiteSeer, PubMed, Reddit, Reddit2, Flickr, Yelp, AmazonProducts, "
    names += "ogbn-arxiv, ogbn-products"
    form = r"a graph file \(\*\.npz\), a prepared folder or sbm:NODES"
    words = "coral", "graph.npy", "", "/tmp", "ogbn-mag", "sbm"
    rows = [(word, f"^--data {word}: no such graph; give one of {names}, {form}") for word in words]
    check_refusals([*rows, (__file__, r"is not a graph file \(\*\.npz\); make one")], opened)


def test_a_graph_that_memory_does_not_hold_is_named(monkeypatch):
    """The advice was to take more --microbatches."""

    def read(*_, **__):
        raise MemoryError("Unable to allocate 7.28 TiB")

    monkeypatch.setattr("vigpipe.graphs.formats.graph_file.read", read)
    check_refusals(
        [("a.npz", "^--data a.npz: memory ran out while it was read .Unable to allocate 7")], opened
    )


def test_without_its_files_a_data_set_says_which(tmp_path):
    folder = write_planetoid(tmp_path, "Cora", planetoid_parts(0))
    (folder / "ind.cora.tx").unlink()
    (folder / "ind.cora.graph").unlink()
    rows = [
        ("Cora", tmp_path, r"raw: lacks ind\.cora\.tx, ind\.cora\.graph of Cora; add"),
        ("Yelp", tmp_path, r"lacks adj_full\.npz, feats\.npy, .*--download"),
    ]
    check_refusals(rows, opened)
    assert not (tmp_path / "Yelp").exists()


class Fails:
    """Stands for a data set of torch-geometric whose `download` ends half way."""

    @property
    def raw_dir(self):
        return f"{self.root}/raw"  # pyrefly: ignore[missing-attribute]

    def download(self):
        (Path(self.raw_dir) / "feats.npy").write_text("half of it")
        raise ConnectionError("no route\nto host")


def test_what_cannot_be_fetched_is_one_sentence_and_leaves_no_half(tmp_path, monkeypatch):
    datasets, package = ModuleType("torch_geometric.datasets"), ModuleType("torch_geometric")
    datasets.Yelp = Fails  # pyrefly: ignore[missing-attribute]
    package.datasets = datasets  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "torch_geometric", package)
    monkeypatch.setitem(sys.modules, "torch_geometric.datasets", datasets)
    (tmp_path / "file").touch()
    rows = [
        (tmp_path / "here", r"Yelp could not be fetched \(ConnectionError: no route\\n"),
        (tmp_path / "file", r"could not be fetched \(NotADirectoryError"),
    ]
    check_refusals(rows, lambda data_dir: opened("yelp", data_dir, download=True))
    assert [path.name for path in (tmp_path / "here").rglob("*")] == ["Yelp", "raw"]
