"""Raw files give the same graph as torch-geometric's own readers make of them."""

import importlib
import os
import shutil
import warnings

import numpy as np
import pytest

from tests.graphs.formats.raw_files import (
    planetoid_parts,
    write_graphsaint,
    write_planetoid,
    write_reddit,
)
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION
from vigpipe.graphs.sources import open_graph

pytestmark = pytest.mark.oldest


def read(name, data_dir, *, download=False):
    return open_graph(
        name, data_dir=data_dir, download=download, features="raw", symmetric=False, seed=0
    )


def torch_geometrics(name, root):
    with warnings.catch_warnings():  # about torch, NumPy and SciPy, from Python 2's names
        warnings.simplefilter("ignore")
        from torch_geometric import datasets

        if name in ("Cora", "CiteSeer", "PubMed"):
            return datasets.Planetoid(str(root), name)[0]
        return getattr(datasets, name)(str(root))[0]


def check(graph, data):
    features = graph.features
    features = features if isinstance(features, np.ndarray) else features.toarray()
    np.testing.assert_array_equal(features, data.x.numpy())
    assert features.dtype == np.float32
    np.testing.assert_array_equal(graph.labels, data.y.numpy())
    masks = (TRAIN, data.train_mask), (VALIDATION, data.val_mask), (TEST, data.test_mask)
    for part, mask in masks:
        np.testing.assert_array_equal(graph.split == part, mask.numpy())
    sources, targets = data.edge_index.numpy()
    order = np.lexsort((sources, targets))
    np.testing.assert_array_equal(graph.indices, sources[order])
    np.testing.assert_array_equal(
        np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr)), targets[order]
    )
    assert len(targets) > 100


@pytest.mark.parametrize(("name", "gaps"), [("Cora", ()), ("CiteSeer", (3, 4, 17))])
def test_planetoid(name, gaps, tmp_path):
    folder = write_planetoid(tmp_path, name, planetoid_parts(1, gaps))
    assert b"_core" not in (folder / f"ind.{name.lower()}.allx").read_bytes()
    graph = read(name.lower(), tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == [name, "raw"]
    assert (graph.name, graph.num_nodes) == (name, 562 + len(gaps))
    check(graph, torch_geometrics(name, tmp_path))


def test_reddit(tmp_path):
    folder = write_reddit(tmp_path / "Reddit", 2)
    check(read("REDDIT", tmp_path), torch_geometrics("Reddit", folder.parent))


@pytest.mark.parametrize("name", ["Flickr", "AmazonProducts"])
def test_graphsaint(name, tmp_path):
    multi_label = name == "AmazonProducts"
    folder = write_graphsaint(tmp_path / name, 3, multi_label=multi_label)
    graph = read(name, tmp_path)
    assert graph.is_multi_label == multi_label
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy / "raw")
    check(graph, torch_geometrics(name, copy))
    assert [path.name for path in folder.parent.iterdir()] == ["raw"]


@pytest.mark.parametrize("name", ["CiteSeer", "Reddit", "Yelp"])
def test_torch_geometric_fetches_what_is_read(name, tmp_path, monkeypatch):
    file = "planetoid" if name == "CiteSeer" else name.lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"torch_geometric.datasets.{file}")
    if name == "CiteSeer":
        source = write_planetoid(tmp_path / "there", name, planetoid_parts(1, (2,)))

        def copy(address, folder):
            shutil.copy(source / os.path.basename(address), folder)

        monkeypatch.setattr(module.fs, "cp", copy)
    elif name == "Reddit":
        source = write_reddit(tmp_path / "there", 2)

        def fetch(_, folder):
            return shutil.make_archive(f"{folder}/reddit", "zip", source)

        monkeypatch.setattr(module, "download_url", fetch)
    else:
        source = write_graphsaint(tmp_path / "there", 3, multi_label=True)

        def fetch_file(_, folder, file):
            shutil.copy(source / file, folder)

        monkeypatch.setattr(module, "download_google_url", fetch_file)
    data_dir = tmp_path / "here"
    graph = read(name, data_dir, download=True)
    assert graph.sha256 == read(name, data_dir).sha256
    assert {path.name for path in data_dir.rglob("*") if path.is_dir()} == {name, "raw"}
    fetched = {path.name for path in (data_dir / name / "raw").iterdir()}
    assert fetched <= {path.name for path in source.iterdir()}
