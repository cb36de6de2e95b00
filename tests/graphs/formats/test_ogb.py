"""The tables of the Open Graph Benchmark: read as they are, fetched, refused if they are wrong."""

import gzip
import shutil
import warnings

import numpy as np
import pytest

from tests.graphs.formats.raw_files import write_ogb
from tests.graphs.formats.test_against_torch_geometric import read
from tests.graphs.restored import restored
from tests.refusals import check_refusals
from vigpipe.errors import InputError
from vigpipe.graphs.formats import ogb
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION


def packed(text: str) -> bytes:
    return gzip.compress(text.encode())


@pytest.mark.parametrize(
    ("name", "split"), [("ogbn-arxiv", "time"), ("ogbn-products", "sales_ranking")]
)
def test_the_graph_is_that_of_the_tables(name, split, tmp_path):
    folder = tmp_path / name.replace("-", "_")
    tables = write_ogb(folder, split, 1)
    graph = read(name.upper(), tmp_path)
    assert (graph.name, graph.num_nodes, graph.num_classes) == (name, 60, 3)
    np.testing.assert_array_equal(graph.features, tables["raw/node-feat"])
    np.testing.assert_array_equal(graph.labels, tables["raw/node-label"][:, 0])
    for part, number in (("train", TRAIN), ("valid", VALIDATION), ("test", TEST)):
        nodes = np.flatnonzero(graph.split == number)
        assert nodes.tolist() == sorted(tables[f"split/{split}/{part}"].tolist())
    edges = {(int(a), int(b)) for a, b in tables["raw/edge"]}
    edges |= {(b, a) for a, b in edges} if name == "ogbn-products" else set()
    targets = np.repeat(np.arange(60), np.diff(graph.indptr)).tolist()
    assert sorted(zip(graph.sources().tolist(), targets, strict=True)) == sorted(edges)


def test_an_archive_is_fetched_and_only_what_is_read_is_kept(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_geometric.data
    there = tmp_path / "there"
    write_ogb(there / "arxiv", "time", 2)
    (there / "arxiv" / "mapping.txt").write_text("more")
    asked = []

    def fetch(address, folder):
        asked.append(address)
        return shutil.make_archive(f"{folder}/arxiv", "zip", there)

    monkeypatch.setattr(torch_geometric.data, "download_url", fetch)
    with pytest.raises(InputError, match=r"ogbn_arxiv: lacks raw/edge\.csv\.gz, .* add --download"):
        read("ogbn-arxiv", tmp_path / "here")
    graph = read("ogbn-arxiv", tmp_path / "here", download=True)
    assert asked == ["https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    files = [p for p in (tmp_path / "here").rglob("*") if p.is_file()]
    assert len(files) == len(ogb.file_names("ogbn-arxiv")) == 6
    assert read("ogbn-arxiv", tmp_path / "here").sha256 == graph.sha256


TABLE_OF_NUMBERS = "is not a compressed table of numbers"
HOSTILE = [
    ("raw/edge", b"1,2", rf"edge\.csv\.gz: {TABLE_OF_NUMBERS} \(Not a"),
    ("raw/edge", packed("1,2\n3,4\n")[:-9], f"edge.* {TABLE_OF_NUMBERS}"),
    ("raw/edge", packed("1,2\n3,x\n"), f"edge.* {TABLE_OF_NUMBERS}"),
    ("raw/edge", packed("1,2,3\n"), r"edge\.csv\.gz: has 3 columns, expected 2"),
    ("raw/node-label", packed(""), r"node-label\.csv\.gz: is empty"),
    ("split/time/test", packed("\n".join(map(str, range(60)))), "of another part"),
]


def test_hostile_tables_are_one_sentence(tmp_path):
    folder = tmp_path / "ogbn_arxiv"
    write_ogb(folder, "time", 3)

    def attempt(table, content):
        path = folder / f"{table}.csv.gz"
        with restored(path):
            path.write_bytes(content)
            read("ogbn-arxiv", tmp_path)

    check_refusals(HOSTILE, attempt, where=folder)


def test_tables_that_unpack_to_too_much_are_left(tmp_path, monkeypatch):
    write_ogb(tmp_path / "ogbn_arxiv", "time", 4)
    monkeypatch.setattr(ogb, "_MOST_NUMBERS", 100)
    with pytest.raises(InputError, match=r"edge\.csv\.gz: has more than 100 numbers"):
        read("ogbn-arxiv", tmp_path)
