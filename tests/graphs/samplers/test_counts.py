"""How often nodes and edges come is counted once, and read by whoever asks later."""

from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.graphs.partitions.small_graphs import edges_of
from tests.graphs.samplers.matrices import GRAPH, NUM_NODES
from vigpipe.graphs.samplers import counts
from vigpipe.graphs.samplers.counts import count, kept_counts
from vigpipe.graphs.samplers.draws import distinct_nodes
from vigpipe.graphs.samplers.saint import by_walks

WALKS = by_walks(GRAPH, 3, 2)
SEED, COVERAGE = 5, 20


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "graph.npz"


def counted(beside, name="walk-3-2", coverage=COVERAGE, seed=SEED):
    return kept_counts(GRAPH, name, WALKS, coverage, seed, beside)


def numbers(found):
    return found.num_drawn, found.of_nodes.tolist(), found.of_edges.tolist()


@pytest.mark.parametrize("at_once", [7, 1 << 14], ids=["seven nodes at once", "all at once"])
def test_counts_are_those_of_a_loop_over_sub_graphs(at_once, monkeypatch):
    monkeypatch.setattr(counts, "_NODES_AT_ONCE", at_once)
    found = count(GRAPH, WALKS, COVERAGE, SEED)
    assert found.num_drawn > 2 * 64  # more than fit into one number
    assert found.num_drawn % 64
    edges = edges_of(GRAPH)
    of_nodes, of_edges = Counter(), Counter()
    for number in range(found.num_drawn):
        assert of_nodes.total() <= COVERAGE * NUM_NODES
        nodes = set(distinct_nodes(WALKS, SEED, 0, number).tolist())
        of_nodes.update(nodes)
        of_edges.update(edge for edge in edges if nodes.issuperset(edge))
    assert of_nodes.total() > COVERAGE * NUM_NODES
    assert found.of_nodes.tolist() == [of_nodes[node] for node in range(NUM_NODES)]
    assert found.of_edges.tolist() == [of_edges[edge] for edge in edges]
    assert found.mean_nodes == of_nodes.total() / found.num_drawn
    assert found.mean_edges == of_edges.total() / found.num_drawn


def test_the_second_time_counts_are_read(beside):
    assert not counted(beside, coverage=21).was_read
    assert not counted(beside, seed=6).was_read
    assert not counted(beside, "walk-4-2").was_read
    made, read = counted(beside), counted(beside)
    assert (made.was_read, read.was_read) == (False, True)
    assert numbers(made) == numbers(read) == numbers(count(GRAPH, WALKS, COVERAGE, SEED))
    assert made.seconds == read.seconds > 0
    assert made.read_seconds is not None
    assert read.read_seconds is not None
    files = {path.name for path in beside.with_name("graph.npz.parts").iterdir()}
    assert f"walk-3-2-20-5-{GRAPH.sha256}-1.safetensors" in files


DAMAGES = [
    lambda arrays: {"of_nodes": arrays["of_nodes"][:-1]},
    lambda arrays: {"of_edges": arrays["of_edges"][1:]},
    lambda arrays: {"of_nodes": arrays["of_nodes"].astype(np.float32)},
    lambda arrays: {"of_nodes": arrays["of_nodes"] // 2},
    lambda arrays: {"of_nodes": 2 * arrays["of_nodes"]},
    lambda arrays: {"of_edges": -arrays["of_edges"]},
    lambda arrays: {"of_edges": arrays["of_edges"] + 9},  # more than their nodes
    *(lambda _, num=num: {"num_drawn": np.array([num])} for num in (1, 0, 1 << 40)),
]


def test_counts_that_cannot_be_are_made_again_with_a_note(beside, capsys):
    made = counted(beside)
    (path,) = beside.with_name("graph.npz.parts").iterdir()
    arrays = load_file(path)
    told = f"{path}: does not hold counts of 60 nodes and {GRAPH.num_edges} edges; they are"
    for number, damage in enumerate(DAMAGES):
        save_file({**arrays, **damage(arrays)}, path)
        again = counted(beside)
        assert not again.was_read, number
        assert numbers(again) == numbers(made)
        note = capsys.readouterr().err
        assert told in note
        assert note.count("\n") == 1
    assert counted(beside).was_read
