"""A prepared folder holds the graph that it was made of, in the order of its parts."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array

from tests.graphs.prepared.folders import DENSE, OTHER, write
from tests.refusals import check_refusals
from vigpipe.graphs.features import are_sparse
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.partitions.partition import edges_between, measured
from vigpipe.graphs.prepared.files import Files
from vigpipe.graphs.prepared.read import check_folder, open_folder


def plain(features):
    return features.toarray() if isinstance(features, csr_array) else features


def assert_same(found, graph):
    for name in ("indptr", "indices", "labels", "split"):
        np.testing.assert_array_equal(getattr(found, name), getattr(graph, name), name)
        assert getattr(found, name).dtype == getattr(graph, name).dtype
    np.testing.assert_array_equal(plain(found.features), plain(graph.features))
    assert type(found.features) is type(graph.features)
    assert (found.class_names, found.node_names) == (graph.class_names, graph.node_names)


GRAPHS = pytest.mark.parametrize("graph", [DENSE, OTHER], ids=["dense", "other"])


@GRAPHS
def test_in_the_users_order_it_is_the_graph_that_was_given(graph, tmp_path):
    manifest = write(tmp_path / "folder", graph)
    opened = open_folder(tmp_path / "folder")
    assert_same(opened.in_users_order(), graph)
    assert opened.manifest == manifest == check_folder(tmp_path / "folder")
    assert are_sparse(opened.features) == are_sparse(graph.features)
    assert opened.is_multi_label == graph.is_multi_label
    assert (opened.num_edges, opened.num_features) == (graph.num_edges, graph.num_features)
    write(tmp_path / "whole", graph, parts=1)
    assert open_folder(tmp_path / "whole").sha256 == graph.sha256 != opened.sha256


@GRAPHS
def test_nodes_are_numbered_part_by_part(graph, tmp_path):
    write(tmp_path / "folder", graph)
    opened, partition = open_folder(tmp_path / "folder"), make_partition(graph, "metis", 6, 0)
    np.testing.assert_array_equal(partition.parts[opened.numbers], opened.partition.parts)
    again = measured(opened, "metis", opened.partition.parts, 6, 0.0)
    assert again.num_kept == opened.partition.num_kept == partition.num_kept
    between = edges_between(opened, opened.partition).toarray()
    np.testing.assert_array_equal(between, edges_between(graph, partition).toarray())
    sources, targets = opened.sources(), opened.targets()
    np.testing.assert_array_equal(opened.loops, sources[sources == targets])
    assert len(opened.loops) == len(graph.loops)
    edges = np.array([5, 0, opened.num_edges - 1, 5])
    np.testing.assert_array_equal(opened.indices[edges], sources[edges])


@GRAPHS
def test_a_folder_can_be_cut_anew(graph, tmp_path):
    write(tmp_path / "first", graph)
    write(tmp_path / "second", open_folder(tmp_path / "first"), method="random", parts=3)
    opened = open_folder(tmp_path / "second")
    assert opened.partition.num_parts == 3
    assert_same(opened.in_users_order(), graph)


def test_a_part_is_read_when_it_is_needed_and_not_before(tmp_path, monkeypatch):
    write(tmp_path / "folder")
    mapped, read = Files._mapped, []

    def told(self, name):
        read.append(name)
        return mapped(self, name)

    monkeypatch.setattr(Files, "_mapped", told)
    graph = open_folder(tmp_path / "folder")
    assert read == ["nodes.safetensors"]
    nodes = graph.partition.nodes_of(4)
    _ = graph.features[nodes], graph.features[nodes[:2]]
    assert read[1:] == ["features/00004.safetensors"]
    _ = graph.indices[graph.edges_into(nodes)[1]]
    assert read[2:] == ["edges/00004.safetensors"]


def test_nothing_is_left_of_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def attempt(name, most_in_file, *graph, **options):
        monkeypatch.setattr("vigpipe.graphs.prepared.write.MOST_IN_FILE", most_in_file)
        write(tmp_path / name, *graph, **options)

    attempt("folder", 999, parts=1)
    before = sorted(path.name for path in tmp_path.iterdir())
    rows = [
        ("folder", 999, r"folder: is there already; choose another name, or rem"),
        ("folder/manifest.json/x", 999, r"x: cannot be written \(File exists\)"),
        ("new", 299, r"new: would have 300 nodes in 6 parts, but a folder has"),
        ("new", 300, OTHER, r"a part would have .* that are not 0, at most 299 are"),
    ]
    check_refusals(rows, lambda *row: attempt(*row, parts=6 if len(row) == 2 else 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_an_attempt_that_was_killed_has_left_is_replaced(tmp_path):
    partial = tmp_path / f".vigpipe-{16 * 'a'}.partial" / "edges"
    partial.mkdir(parents=True)
    (partial / "00009.safetensors").write_text("old")
    write(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert len(list((tmp_path / "folder" / "edges").iterdir())) == 6


def test_a_graph_without_edges_and_parts_of_one_node_are_possible(tmp_path):
    graph = replace(DENSE, indptr=np.zeros(301, np.int64), indices=np.zeros(0, np.int64))
    write(tmp_path / "folder", graph, method="random", parts=300)
    assert_same(open_folder(tmp_path / "folder").in_users_order(), graph)
