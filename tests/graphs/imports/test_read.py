"""Tables, saved Data, folders and objects become the graph that they say, or one sentence."""

import gzip
import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from scipy import sparse

from tests.graphs.formats.raw_files import write_graphsaint, write_ogb
from tests.graphs.partitions.small_graphs import edges_of
from tests.model.gnn.graphs import pyg
from tests.refusals import check_refusals
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.commands.dataset import check_import, import_dataset
from vigpipe.config.verbs import ImportConfig
from vigpipe.errors import InputError
from vigpipe.graphs.choices import Choices
from vigpipe.graphs.formats import graphsaint, ogb
from vigpipe.graphs.formats.graph_file import graph_of, read
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION, Graph
from vigpipe.graphs.imports import tables
from vigpipe.graphs.imports.objects import arrays_of

NODES = """id,label,kg,cover,split
ape,warm,40,fur,train
bee,cold,,wing,train
cod,cold,2.5,scale,test
dog,warm,17.5,fur,validation
eel,,3,scale,
"""
EDGES = """source,target,weight,since
ape,bee,0.5,1999
cod,dog,2,2001
ape,bee,1,2003
eel,eel,3,2004
"""
LABELS = "id,label,split\n0,b,train\n1,a,train\n2,a,test\n3,b,test\n4,,\n"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nodes.csv").write_text(NODES)
    Path("edges.csv").write_text(EDGES)


def imported(out="g.npz", **options: Any) -> Graph:
    """Import what the options name, and read it back."""
    options = {name: Path(v) if name in PATHS else v for name, v in options.items()}
    Path(out).unlink(missing_ok=True)
    import_dataset(Path(out), ImportConfig(**options))
    return read(Path(out), trains=False)


PATHS = ("nodes", "edges", "features", "data", "like")
TABLES: dict[str, Any] = {"nodes": "nodes.csv", "edges": "edges.csv"}


def dense(graph: Graph) -> np.ndarray:
    features: Any = graph.features
    return features.toarray() if sparse.issparse(features) else np.asarray(features)


def test_tables_of_nodes_and_edges(capsys):
    graph = imported(**TABLES)
    assert graph.node_names == ("ape", "bee", "cod", "dog", "eel")
    assert graph.class_names == ("cold", "warm")
    assert graph.labels.tolist() == [1, 0, 0, 1, -1]
    assert graph.split.tolist() == [TRAIN, TRAIN, TEST, VALIDATION, -1]
    weights: Any = graph.weights_of(slice(None))
    found = dict(zip(edges_of(graph), weights.tolist(), strict=True))
    assert found == {(0, 1): 1.5, (2, 3): 2, (4, 4): 3}
    kg = np.array([40, 2.5, 17.5, 3])
    column = (kg - kg.mean()) / kg.std()
    expected = [[0.0, 0, 0, 0]] * 5
    x = np.array(expected)
    x[[0, 2, 3, 4], 0] = column
    x[[0, 3], 1] = x[[2, 4], 2] = x[1, 3] = 1  # fur, scale, wing
    np.testing.assert_allclose(dense(graph), x, rtol=1e-6)
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "note: columns of edges that are left out: since",
        "note: 1 node without a class: the label is ''",
        "note: features: kg (number), cover (3 values)",
        "note: empty cells, taken as the mean of a column of numbers, or as no category: 1 in kg",
        "g.npz: 5 nodes, 3 directed edges with weights, 4 features, 2 classes, 2 train, "
        "1 validation, 1 test nodes",
    ]


def test_tables_in_other_forms_and_pieces_are_the_same_graph(monkeypatch):
    first = imported(**TABLES)
    for name in ("nodes", "edges"):
        rows = Path(f"{name}.csv").read_text().splitlines()
        of_tsv = "\n".join(row.replace(",", "\t") for row in rows)
        Path(f"{name}.tsv").write_text(f"\ufeff{of_tsv}\r\n\n")
        Path(f"{name}.csv.gz").write_bytes(gzip.compress(Path(f"{name}.csv").read_bytes()))
        table = pa.csv.read_csv(f"{name}.csv")
        pa.parquet.write_table(table, f"{name}.parquet", row_group_size=2)
    monkeypatch.setattr(tables, "_AT_ONCE", 10)
    for suffix in ("csv", "tsv", "csv.gz", "parquet"):
        other = imported(nodes=f"nodes.{suffix}", edges=f"edges.{suffix}")
        assert other.sha256 == first.sha256, suffix
        np.testing.assert_allclose(dense(other), dense(first), rtol=1e-6)
        assert other.node_names == first.node_names


def test_columns_have_other_names_and_kinds_on_request():
    nodes = NODES.replace("id,label,kg", "who,warm,zip").replace("ape,warm,40", "ape,warm,7")
    Path("nodes.csv").write_text(nodes)
    Path("edges.csv").write_text(EDGES.replace("source,target,weight,since", "a,b,w,weight"))
    graph = imported(
        **TABLES, id="who", label="warm", source="a", target="b", weight="w", categories="zip",
        drop="cover",
    )  # fmt: skip
    assert graph.choices is not None
    assert [c.values for c in graph.choices.columns] == [("17.5", "2.5", "3", "7")]  # pyrefly: ignore[missing-attribute]
    assert graph.class_names == ("cold", "warm")


def test_a_node_may_have_several_classes():
    rows = ["id,a,b,kg,split", "0,1.0,0,1,train", "1,NA,true,2,train", "2,0,1,3,test", "3,,,4,"]
    Path("nodes.csv").write_text("\n".join(rows))
    Path("edges.csv").write_text("source,target\n0,1\n")
    graph = imported(**TABLES, label="a,b")
    assert graph.is_multi_label
    assert graph.labels.tolist() == [[1, 0], [-1, 1], [0, 1], [-1, -1]]
    assert graph.class_names == ("a", "b")
    assert graph.node_names is None
    with pytest.raises(InputError, match=r"class 0 \('0'\) has no training nodes"):
        imported(**TABLES, label="a,b", drop="b")  # one column is one class a node


def test_cells_as_other_programs_write_them():
    rows = [" 1,x ,0.1,1.0,#N/A,0.0", "2,NaN,0.1,0.0,u,", "3,-1,0.1,NA,u ,NA", "4, y,0.1,,w,0.0"]
    rows = ["", "id,label,a,b,c,split", *rows, "5,x,0.1,0,w,2.0"]
    Path("nodes.csv").write_text("\n".join(rows))
    Path("edges.csv").write_text("source , target\n1 , 2\n")
    graph = imported(**TABLES, label="label", drop="b")
    assert graph.class_names == ("x", "y")
    assert graph.labels.tolist() == [0, -1, -1, 1, 0]
    assert graph.split.tolist() == [0, -1, -1, 0, 2]
    x = [[0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    np.testing.assert_allclose(dense(graph), x, atol=1e-9)
    assert imported(**TABLES, drop="split,b", test=0.5).choices == graph.choices
    Path("new.csv").write_text("id,a,c\n7,0.3,u\n")
    Path("edges.csv").write_text("source,target\n")
    like = imported("n.npz", nodes="new.csv", edges="edges.csv", like="g.npz")
    np.testing.assert_allclose(dense(like), [[0.2, 1, 0]], rtol=1e-6)  # it was constant


def test_choices_are_made_again_for_other_nodes(capsys):
    first = imported(**TABLES)
    assert first.choices is not None
    save_weights(Path("w.safetensors"), {}, {"columns": first.choices.as_text()})
    Path("new.csv").write_text("id,cover,kg,shoe\n1,fur,40,9\n0,shell,,9\n")
    Path("none.csv").write_text("source,target\n")
    capsys.readouterr()
    for like in ("w.safetensors", "g.npz"):
        graph = imported("new.npz", nodes="new.csv", edges="none.csv", like=like)
        assert graph.choices == first.choices
        assert dense(graph).tolist() == [dense(first)[0].tolist(), [0, 0, 0, 0]]
        assert graph.node_names == ("1", "0")
        told = capsys.readouterr().out
        assert "columns that --like does not know: shoe" in told
        assert "texts that --like does not know, taken as no category: 1 in cover" in told


def saved(found, path="d.pt"):
    torch.save(found, path)
    return path


def test_saved_data_of_torch_geometric_and_the_object_are_the_same_graph():
    pyg()  # without its warnings
    from torch_geometric.data import Data

    draws = torch.Generator().manual_seed(0)
    masks = {name: torch.arange(30) % 3 == i for i, name in enumerate(("train", "val", "test"))}
    of_masks = {f"{name}_mask": mask for name, mask in masks.items()}
    edges = torch.randint(0, 30, (2, 90), generator=draws)
    x, y = torch.randn(30, 4, generator=draws), torch.arange(30) % 5
    for labels in (y, y[:, None], torch.nn.functional.one_hot(y).float(), (x > 0).float()):
        data = Data(x=x, edge_index=edges, y=labels, edge_weight=torch.ones(90) / 2, **of_masks)
        several = labels.ndim == 2 and labels.shape[1] > 1 and bool((labels.sum(1) != 1).any())
        given = graph_of(arrays_of(data, "data"), "data", multi_label=several)
        for found in (data, (data.to_dict(), None, Data)):
            graph = imported(data=saved(found))
            assert graph.sha256 == given.sha256
            np.testing.assert_array_equal(dense(graph), x)
        data.is_node_attr("x")  # as transforms ask, which makes it remember the kinds
        assert imported(data=saved(data)).sha256 == given.sha256
        assert graph.is_multi_label == several
        np.testing.assert_array_equal(given.labels, labels if several else y)
        assert given.split.tolist() == [i % 3 for i in range(30)]
        table = {name: value.numpy() for name, value in data.to_dict().items()}
        assert graph_of(arrays_of(table, "t"), "t", multi_label=several).sha256 == given.sha256


def test_a_graph_of_networkx_is_that_of_its_attributes():
    import networkx

    found = networkx.Graph()
    rows = [line.split(",") for line in NODES.splitlines()[1:]]
    for name, label, kg, cover, split in rows:
        facts = {"label": label or None, "kg": float(kg) if kg else None, "cover": cover}
        found.add_node(name, **facts, split=split or None)
    for a, b, weight in (("ape", "bee", 1.5), ("cod", "dog", 2.0), ("eel", "eel", 3.0)):
        found.add_edge(a, b, weight=weight)
    graph = graph_of(arrays_of(found, "data"), "data")
    expected = imported(**TABLES)
    part = found.subgraph(["ape", "cod"])
    again = arrays_of(part, "data", expected.choices)
    of_names = dict(zip(again["names"].tolist(), again["x"].tolist(), strict=True))
    assert of_names == {"ape": dense(expected)[0].tolist(), "cod": dense(expected)[2].tolist()}
    np.testing.assert_allclose(dense(graph), dense(expected), rtol=1e-6)
    assert graph.labels.tolist() == expected.labels.tolist()
    assert graph.node_names == expected.node_names
    weights: Any = graph.weights_of(slice(None))
    found_edges = dict(zip(edges_of(graph), weights.tolist(), strict=True))
    assert found_edges == {(0, 1): 1.5, (1, 0): 1.5, (2, 3): 2, (3, 2): 2, (4, 4): 3}
    for number, node in enumerate(found.nodes):
        found.nodes[node].clear()
        found.nodes[node].update(x=[number, 1.0], y=number % 2, split=("train", "test")[number > 1])
    graph = graph_of(arrays_of(found.to_directed(), "data"), "data")
    assert dense(graph).tolist() == [[n, 1] for n in range(5)]
    assert graph.labels.tolist() == [0, 1, 0, 1, 0]


def test_graphs_of_networkx_that_say_two_things_are_refused():
    import networkx

    def made(weights=(None, None), **facts):
        found = networkx.path_graph(3)
        for edge, weight in zip(found.edges, weights, strict=True):
            found.edges[edge].update({} if weight is None else {"weight": weight})
        for node in found:
            found.nodes[node].update({name: of[node] for name, of in facts.items()})
        return found

    x = [[0.0], [1.0], [2.0]]
    rows = [
        (made(x=x, age=[1, 2, 3]), "its nodes have x, and beside it age; leave out x, or what"),
        (made(x=x, y=[0, 1, 0], label=[0, 1, 0]), "its nodes have two attributes 'label'"),
        (made((1.0, None), x=x), "some edges have a weight and others none; give each one"),
        (made(x=[[0.0], [1.0, 2.0], [2.0]]), "x is object of shape .*, expected numbers or texts"),
        (made(emb=[x, x, x]), "the attribute 'emb' of a node is a list, expected a number or text"),
        (networkx.compose(made(age=[1, 2, 3]), networkx.path_graph(4)), "node '3' has no attribu"),
        (made(), "its nodes have no features; give them x, or attributes to make"),
    ]
    read: Any = lambda found: graph_of(arrays_of(found, "data"), "data", trains=False)  # noqa: E731
    check_refusals(rows, read, where="data: ")


def test_folders_in_the_layouts_of_ogb_and_graphsaint():
    write_ogb(Path("mine"), "time", 0)
    graph = imported(data="./mine/")
    assert graph.sha256 == ogb.read("mine", Path("mine")).sha256
    shutil.rmtree("mine")
    folder = write_graphsaint(Path("ours"), 0, multi_label=True)
    graph = imported(data=f"./{folder}")
    theirs = graphsaint.read("ours", folder)
    assert graph.labels.tolist() == theirs.labels.tolist()
    np.testing.assert_array_equal(dense(graph), dense(theirs))
    matrix = sparse.load_npz(folder / "adj_full.npz").tocoo()
    weights: Any = graph.weights_of(slice(None))
    found = dict(zip(edges_of(graph), weights.tolist(), strict=True))
    pairs = zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.tolist(), strict=True)
    assert found == pytest.approx({(a, b): w for a, b, w in pairs}, rel=1e-6)


def test_matrices_of_scipy_and_numpy():
    Path("labels.csv").write_text(LABELS)
    adjacency = sparse.csr_array(np.eye(5, k=1) * 2)
    x = np.arange(10.0).reshape(5, 2)
    sparse.save_npz("a.npz", adjacency)
    sparse.save_npz("x.npz", sparse.csr_array(x))
    np.save("x.npy", x)
    rows = "".join(f"{i},{i + 1},2\n" for i in range(4))
    Path("e.csv").write_text(f"source,target,weight\n{rows}")
    sparse.save_npz("c.npz", adjacency.tocsc())
    sparse.save_npz("o.npz", adjacency.tocoo())
    graphs = [
        imported(nodes="labels.csv", edges=edges, features=features)
        for edges in ("a.npz", "c.npz", "o.npz", "e.csv")
        for features in ("x.npy", "x.npz")
    ]
    assert len({graph.sha256 for graph in graphs}) == 1
    for graph in graphs:
        np.testing.assert_array_equal(dense(graph), x)
        assert edges_of(graph) == [(i, i + 1) for i in range(4)]
    alone = imported(edges="a.npz", features="x.npy")
    assert alone.class_names == ()


def test_a_split_is_drawn_of_every_class():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    Path("n.csv").write_text("id,label,v\n" + "".join(f"{i},{c},1\n" for i, c in enumerate(labels)))
    Path("edges.csv").write_text("source,target\n0,1\n")
    options: dict[str, Any] = {"nodes": "n.csv", "edges": "edges.csv", "test": 0.2}
    graph = imported(**options, validation=0.1)
    counts = [np.bincount(labels[graph.split == part]).tolist() for part in (TEST, VALIDATION)]
    assert counts == [[20, 10, 2], [8, 4, 1]]
    again, other = imported(**options, validation=0.1), imported(**options, validation=0.1, seed=1)
    assert again.sha256 == graph.sha256 != other.sha256
    plain = imported(**options, stratified=False)
    assert (plain.split == TEST).sum() == 32
    assert (plain.split == VALIDATION).sum() == 0
    import_dataset(Path("none.npz"), ImportConfig(nodes=Path("n.csv"), edges=Path("edges.csv")))
    drawn = imported(data="none.npz", test=0.2, validation=0.1)
    assert drawn.sha256 == graph.sha256


def of_text(name: str, text: str | bytes, **options: Any):
    """Import the tables, one of which has this text."""
    path = Path(f"{name}.csv")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return {**TABLES, **options}


BARE = "id,kg\nape,1\nbee,2\ncod,3\ndog,4\neel,5\n"
MANY = "id,t\n" + "".join(f"{i},t{min(i, 39)}\n" for i in range(60))
OTHER = "id,label,kg,split\na,x,1,train\nb,x,2,test\n"
DAMAGED: list[tuple[Any, ...]] = [
    ("nodes", "", "has the columns , and no 'id'; name the columns of --id"),
    ("nodes", "id,kg\n", "nodes.csv: has no rows, expected one for each node"),
    ("nodes", "id,kg,kg\na,1,2\n", "the column 'kg' is there twice"),
    ("nodes", "id,kg,\na,1,2\n", "the column '' has no name"),
    ("nodes", "name;kg\na;1\n", "has the columns name;kg, and no 'id'"),
    ("nodes", NODES.replace("dog", "ape"), "two nodes have the id 'ape'"),
    ("nodes", NODES.replace("eel,,3,scale,", "eel,,3"), "row 5 after the names has 3 cells, exp"),
    ("nodes", NODES.replace("17.5", "inf"), "column 'kg': is infinite in row 4"),
    ("nodes", NODES.replace("validation", "maybe"), "the split of row 4 is 'maybe', expected tra"),
    ("nodes", b"id,kg\n\xff,1\n", "cannot be read as a table .*utf-8.*; save it as UTF-8"),
    ("nodes", 'id,kg\n"a,1\n', "cannot be read as a table .*; save it as UTF-8 csv"),
    ("nodes", "id,kg\na," + "1" * 200000 + "\n", "cannot be read as a table .field larger"),
    ("nodes", "id,label,split\na,x,train\n", "has no column for features beside id, label"),
    ("nodes", OTHER, "edges.csv: row 1 names the node 'ape', which nodes.csv does not have; add"),
    ("nodes", NODES.replace(",40,", ",4O,"), {"numbers": "kg"}, "column 'kg': is not of numbers"),
    ("nodes", NODES, {"label": "klass"}, "and no 'klass'; name the columns of --label as"),
    ("nodes", NODES, {"split": "part"}, "and no 'part'; name the columns of --split as"),
    ("nodes", NODES, {"drop": "colour"}, "and no 'colour'; name the columns of --drop as"),
    ("nodes", NODES, {"label": "label,cover"}, "the label of row 1 is 'warm', expected 1, 0 or no"),
    ("nodes", "id,t\n" + "".join(f"{i},t{i}\n" for i in range(1500)), "has more than 1,000 diff"),
    ("nodes", NODES, {"test": 0.2}, "--test 0.2: draws a split, and nodes.csv has one; leave it"),
    ("nodes", BARE, {"test": 0.2}, "--test 0.2: draws nodes that have a class, and nodes.csv has"),
    ("nodes", NODES.replace("ape,warm", " ,warm"), "row 1 has no id; give it one"),
    (
        "nodes",
        NODES.replace("17.5", "17,5".replace(",", ".5.")),
        "has numbers, but also '17.5.5'; m",
    ),
    ("nodes", MANY, "has 40 different texts in 60 rows, each of which would be a feature; leave"),
    ("nodes", NODES.replace("split", "train_mask"), "has train_mask, which would be features; mak"),
    (
        "nodes",
        NODES,
        {"numbers": "kg", "categories": "kg"},
        "--numbers kg: is in --categories",
    ),
    ("edges", EDGES, {"edges": "rect.npz"}, "rect.npz: is 5 × 4, expected a row and a column for"),
    ("edges", EDGES, {"edges": "bad.npz"}, "bad.npz: is no matrix of scipy"),
    (
        "nodes",
        NODES.replace("40", "4O"),
        {"like": "like.npz"},
        "column 'kg': is not of num.*4O",
    ),
    ("nodes", NODES, {"drop": "id"}, "--drop id: has the ids of the nodes, which are needed"),
    ("edges", "a,b\n", "edges.csv: has the columns a, b, and no 'source'; name others with --sou"),
    ("edges", EDGES.replace("cod", "cat"), "row 2 names the node 'cat', which nodes.csv does not"),
    (
        "edges",
        EDGES.replace("dog,2", "dog,two"),
        "the weight of row 2 is 'two', expected",
    ),
    (
        "edges",
        EDGES.replace("dog,2", "dog,-2"),
        "the weight of row 2 is '-2', expected",
    ),
    ("edges", EDGES, {"weight": "w"}, "and no 'w'; name another with --weight"),
    ("edges", EDGES, {"like": "g.npz"}, "--like g.npz: does not say how its features were made"),
    ("edges", EDGES, {"features": "x.npy"}, "x.npy: has 3 rows, but nodes.csv 5; give a row of"),
    ("edges", EDGES, {"features": "x.npz"}, "is not a csr, csc or coo matrix of scipy; save it"),
]


def test_damaged_tables_are_one_sentence_each():
    np.savez("g.npz", x=np.eye(3), edge_src=[0], edge_dst=[1])
    np.savez("x.npz", x=np.eye(5))
    np.save("x.npy", np.eye(3))
    imported("like.npz", **TABLES)
    sparse.save_npz("rect.npz", sparse.csr_array((5, 4)))
    good = {"format": np.array(b"csr"), "shape": [5, 5], "data": [1.0], "indices": [9]}
    np.savez("bad.npz", **good, indptr=[0, 1, 1, 1, 1, 1])

    def attempt(name, text, more=None):
        Path("nodes.csv").write_text(NODES)
        Path("edges.csv").write_text(EDGES)
        imported("out.npz", **of_text(name, text, **(more or {})))

    check_refusals([(n, t, *rest) for n, t, *rest in DAMAGED], attempt)
    assert not Path("out.npz").exists()
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def test_damaged_files_are_one_sentence_each():
    pyg()
    from torch_geometric.data import Data, HeteroData

    edges, x = torch.tensor([[0], [1]]), torch.eye(3)
    whole = Path(saved(Data(x=x, edge_index=edges))).read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    Path("evil.pt").write_bytes(pickle.dumps(print))
    with zipfile.ZipFile("fat.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000)
    saved((Data(x=x).to_dict(), {"x": torch.arange(4)}, Data), "two.pt")
    saved([1, 2], "list.pt")
    saved(Data(x=x, edge_index=edges, pos=x), "pos.pt")
    saved(Data(x=x, edge_index=torch.zeros(3, 1).long()), "odd.pt")
    saved(Data(x=x, edge_index=edges + 2), "far.pt")
    masks = torch.ones(3, 2).bool()
    saved(Data(x=x, edge_index=edges, y=x[0].long(), train_mask=masks), "masks.pt")
    both = {"train_mask": masks[:, 0], "test_mask": masks[:, 0]}
    saved(Data(x=x, edge_index=edges, y=x[0].long(), **both), "both.pt")
    saved(HeteroData(), "hetero.pt")
    Path("empty").mkdir()
    write_ogb(Path("splits"), "time", 0)
    Path("splits/split/more").mkdir()
    rows = [
        ("cut.pt", "cannot be read as a saved Data"),
        ("evil.pt", "cannot be read as a saved Data"),
        ("fat.pt", "cannot be read as a saved Data .*compressed"),
        ("two.pt", "holds several graphs, expected one"),
        ("list.pt", "holds a int, expected a Data of torch-geometric"),
        ("pos.pt", "has pos, expected none but edge_src"),
        ("odd.pt", r"edge_index has the shape \(3, 1\), expected \(2, e\)"),
        ("far.pt", "edge 0 goes from node 2 to node 3, but with 3 nodes they count from 0 to 2"),
        ("masks.pt", r"train_mask have the shapes \(3, 2\), expected true or false for each node"),
        ("both.pt", "node 0 is in several of train_mask, test_mask"),
        ("none.pt", "cannot be read .No such file"),
        ("hetero.pt", "cannot be read as a saved Data|holds a"),
        ("./empty", "is neither a saved Data .* nor a folder with raw/edge.csv.gz"),
        ("./splits", "has the folders more, time, expected one"),
    ]
    check_refusals(rows, lambda name: imported("out.npz", data=name))


def test_options_that_do_not_go_together():
    path = Path("p")
    rows: list[tuple[Any, str]] = [
        ({}, "--edges, --data: neither given; name tables"),
        ({"edges": path, "data": path}, "--edges, --data: both given"),
        ({"data": path, "like": path}, "--like p: is for tables, and --data is a whole graph"),
        ({"edges": path}, "--nodes: is missing beside --edges"),
        ({"edges": path, "features": path, "like": path}, "--like p: is for columns that become"),
        ({"edges": path, "nodes": path, "like": path, "numbers": "a"}, "--numbers a: is a choice"),
        ({"edges": path, "nodes": path, "features": path, "drop": "a"}, "--drop a: is for columns"),
        ({"data": path, "validation": 0.1}, "--validation 0.1: is drawn with the test nodes"),
        ({"data": path, "test": 1.5}, "--test 1.5: "),
        ({"data": path, "seed": -1}, "--seed -1: "),
    ]
    check_refusals(rows, lambda options: check_import(ImportConfig(**options)))


def test_choices_that_nobody_has_written_are_refused():
    good = {"name": "a", "mean": 0.0, "deviation": 1.0}
    for text in (
        *("", "{}", "[1]", "[" * 100_000, '[{"name": "a"}]'),
        *(json.dumps([{**good, **change}]) for change in ({"deviation": 0}, {"name": 1}, {"x": 1})),
        json.dumps([{"name": "a", "values": ["b", "b"]}]),
        '[{"name": "a", "mean": NaN, "deviation": 1}]',
    ):
        words = "w: its columns are not what an import writes"
        check_refusals([(text, words)], lambda text: Choices.parse(text, "w"))
    choices = Choices.parse(json.dumps([good, {"name": "c", "values": ["é\u2028", "b"]}]), "w")
    assert Choices.parse(choices.as_text(), "w") == choices
