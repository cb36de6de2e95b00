"""`vigpipe predict` with a graph: the classes of its nodes, equal with any number of stages."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vigpipe
from tests.commands.graphs import CLASSES, NUM_NODES, OPTIONS, logits_of, write_graph, write_weights
from tests.commands.refusals import check_commands, refused
from tests.world import run_command
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.commands.dataset import prepare_dataset
from vigpipe.config.verbs import PredictConfig, PrepareConfig
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.graphs.graph import TEST
from vigpipe.inference.graph_description import read_graph_description
from vigpipe.inference.predict import most_likely
from vigpipe.inference.predict_nodes import NodePrediction
from vigpipe.inference.samples import NodeSamples
from vigpipe.model.variants import create_model

OURS = "--weights w.safetensors"


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    monkeypatch.setattr("vigpipe.launch.local.preload", lambda *modules: None)


def told(capsys, *arguments: str, data: str = "g.npz", known: bool = True) -> list[dict]:
    line = ["predict", *OURS.split(), "--data", data, "--format", "json", "--threads", "1"]
    assert main([*line, *arguments]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr.startswith("vigpipe: score of 10 test nodes: loss ") == known
    assert known or stderr == ""
    return [json.loads(line) for line in stdout.splitlines()]


@pytest.mark.parametrize("model", OPTIONS)
def test_predictions_are_those_of_the_model_on_the_whole_graph(model, capsys):
    write_graph()
    job = write_weights(model)
    rows = told(capsys)
    assert [row["node"] for row in rows] == list(range(NUM_NODES))
    likely = logits_of(job).double().softmax(1).sort(descending=True, stable=True)
    for row, values, labels in zip(rows, *likely, strict=True):
        assert [each["label"] for each in row["top"]] == labels.tolist()
        assert [each["class"] for each in row["top"]] == [CLASSES[i] for i in labels]
        found = [each["probability"] for each in row["top"]]
        np.testing.assert_allclose(found, values, atol=1e-5)
    assert len({row["top"][0]["probability"] for row in rows}) > 1


def test_nodes_with_several_classes_have_probabilities_of_their_own(capsys):
    write_graph(several=True)
    job = write_weights()
    expected = logits_of(job).double().sigmoid()
    for row in told(capsys):
        for each in row["top"]:
            wanted = expected[row["node"], each["label"]].item()
            assert each["probability"] == pytest.approx(wanted, abs=1e-5)
    assert most_likely(torch.tensor([[0.0, 50.0, 50.0]]), several=True)[1].tolist() == [[1, 2, 0]]


def test_a_split_s_nodes_are_told_by_their_names(capsys):
    write_graph(names=np.array([f"node of {i}" for i in range(NUM_NODES)]))
    job = write_weights()
    rows = told(capsys, "--split", "test")
    assert [row["node"] for row in rows] == job.graph.nodes_of(TEST).tolist()
    assert [row["name"] for row in rows] == [f"node of {row['node']}" for row in rows]
    assert main(["predict", *OURS.split(), "--data", "g.npz", "--split", "test"]) == 0
    blocks = capsys.readouterr().out.removesuffix("\n\n").split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [row["name"] for row in rows]
    assert {len(block.splitlines()) for block in blocks} == {1 + len(CLASSES)}


def test_a_node_is_a_line_and_one_for_each_class():
    found = NodePrediction(7, None, (0, 2), ("ant", "cow"), (0.75, 0.25))
    assert found.as_text() == "node 7\n  75.00%  ant\n  25.00%  cow\n"
    assert NodePrediction(7, "a\nb", (), (), ()).as_text() == "a\\nb\n"


@pytest.mark.multiprocess
def test_stages_predict_the_same(capsys):
    write_graph()
    write_weights("gcn")
    options = f"predict {OURS} --data g.npz --format json --threads 1 --stages 2"
    done = run_command([sys.executable, "-m", "vigpipe", *options.split()])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == told(capsys)


def test_logits_that_are_no_numbers_are_no_prediction(capsys):
    write_graph()
    job = write_weights()
    state = job.make_model().state_dict()
    for value, code, words in (
        (3e38, 76, "vigpipe: node 0: the model's logits are NaN or infinite; check the"),
        (torch.nan, 2, "vigpipe: w.safetensors: 640 of the 640 numbers of convs.0.lin_l"),
    ):
        filled = {name: torch.full_like(tensor, value) for name, tensor in state.items()}
        save_weights(Path("w.safetensors"), filled, read_metadata(Path("w.safetensors")))
        assert main(["predict", *OURS.split(), "--data", "g.npz"]) == code
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        assert stderr.startswith(words)


WRONG = [
    (OURS, "w.safetensors: holds a sage", "name the graph with --data"),
    (f"{OURS} a.png", "holds a sage", "not of images"),
    (
        "--weights images.safetensors --data g.npz",
        *("--data g.npz", "images.safetensors holds a vig_digits", "name image files"),
    ),
    (f"{OURS} --data g.npz a.png", "a.png: is an image", "leave one of the two out"),
    (f"{OURS} --data wide.npz", "has 6 features, but the model in w.safetensors was trained on 5"),
    (f"{OURS} --data many.npz", "has 1 class (doe), which", "its classes are ant, bee, cow"),
    (
        f"{OURS} --data numbers.npz",
        "has 4 classes, and the model in w.safetensors 3; one of",
    ),
    (f"{OURS} --data several.npz", "a node has any number of classes, but for the model in w"),
    (f"{OURS} --data g.npz --nodes 3,4,3", "--nodes 3: is the same node as 3; name it once"),
    (f"{OURS} --data g.npz --nodes 40", "--nodes 40: g.npz has no such node; give a number from 0"),
    (f"{OURS} --data g.npz --nodes ,", "--nodes ,: names no node; give names or numbers with"),
    (f"{OURS} --data g.npz --nodes {'9' * 5000}", "has no such node; give a number from 0"),
    (f"{OURS} --data g.npz --nodes none.txt", "none.txt", "cannot be read"),
    (f"{OURS} --data g.npz --nodes 3 --split test", "--nodes 3: chooses the nodes", "--split test"),
    ("--weights images.safetensors a.png --nodes 3", "--nodes 3: is for the nodes of a graph"),
    (f"{OURS} --data none.npz", "none.npz"),
    (
        f"{OURS} --data unvalidated.npz --split validation",
        "--split validation: unvalidated.npz has no such nodes",
    ),
    (f"{OURS} --data g.npz --split half", "--split half", "validation"),
    (f"{OURS} --data g.npz --dp 2", "--dp 2: is for images", "leave it out"),
    (f"{OURS} --data g.npz --skip-bad-images", "--skip-bad-images: is for images"),
    (f"{OURS} --data g.npz --stages 3", "3 stages for 2 blocks"),
    (
        "--weights images.safetensors a.png --split test",
        *("--split test: is for the nodes of a graph", "--data"),
    ),
    (f"{OURS} --data Cora", "of Cora", "--download"),
]


def test_wrong_use_is_told_in_one_sentence(capsys):
    write_graph()
    write_graph("wide.npz", num_features=6)
    write_graph("several.npz", several=True)
    write_graph("many.npz", y=np.arange(NUM_NODES) % 4, classes=np.array([*CLASSES, "doe"]))
    write_graph("numbers.npz", y=np.arange(NUM_NODES) % 4, classes=None)
    write_graph("unvalidated.npz", split=np.repeat([0, 2], NUM_NODES // 2))
    write_weights()
    Image.new("RGB", (8, 8)).save("a.png")
    facts = {"model": "vig_digits", "num_classes": "7", "in_chans": "3", "img_size": "8x8"}
    state = create_model("vig_digits", num_classes=7).state_dict()
    save_weights(Path("images.safetensors"), state, facts)
    check_commands(capsys, "predict", WRONG)
    check_commands(
        capsys,
        "",
        [
            (f"graph {OURS} --image a.png", "holds a sage, which is a model of a graph"),
            ("weights convert w.safetensors v.safetensors", "not the whole of a model"),
        ],
    )


def test_metadata_that_cannot_be_are_refused(capsys):
    write_graph()
    state = write_weights().make_model().state_dict()
    metadata = read_metadata(Path("w.safetensors"))
    for name, value in (
        *(("num_features", "-1"), ("layers", "many"), ("width", ""), ("heads", "0")),
        *(("norm", "group"), ("features", "log"), ("symmetric", "perhaps"), ("multi_label", "")),
        *(("num_classes", "9" * 40), ("class_names", '["ant"]'), ("class_names", "{")),
        ("aggregator", "lstm"),
    ):
        save_weights(Path("w.safetensors"), state, {**metadata, name: value})
        assert name in refused(capsys, "predict", *OURS.split(), "--data", "g.npz")


@pytest.mark.parametrize(("model", "several"), [*((m, False) for m in OPTIONS), ("gat", True)])
def test_graphs_without_labels_are_predicted_whole_and_in_parts_in_any_numbering(
    model, several, capsys
):
    """The graph of the training with ten new nodes; an edge from each goes to an old one."""
    write_graph(several=several)
    job = write_weights(model)
    arrays = dict(np.load("g.npz"))
    random, num = np.random.default_rng(3), NUM_NODES + 10
    new = np.arange(NUM_NODES, num)
    ends = np.concatenate((arrays["edge_src"], new, random.integers(0, NUM_NODES, 30)))
    others = np.concatenate((arrays["edge_dst"], random.integers(0, NUM_NODES, 10)))
    others = np.concatenate((others, np.repeat(new, 3)))
    x = np.concatenate((arrays["x"], random.random((10, 5)))).astype(np.float32)
    np.savez("new.npz", edge_src=ends, edge_dst=others, x=x)
    order = random.permutation(num)
    place = np.argsort(order)
    np.savez("other.npz", edge_src=place[ends], edge_dst=place[others], x=x[order])

    def predicted(data, *arguments):
        rows = told(capsys, *arguments, data=data, known=False)
        likely = ({each["class"]: each["probability"] for each in row["top"]} for row in rows)
        found = np.array([[of_node[name] for name in CLASSES] for of_node in likely])
        return [row["node"] for row in rows], [row["predicted"] for row in rows], found

    numbers, classes, whole = predicted("new.npz")
    assert numbers == list(range(num))
    description = read_graph_description(Path("w.safetensors"))
    graph = description.open("new.npz", Path())
    logits = logits_of(replace(job, graph=graph)).double()
    np.testing.assert_allclose(whole, logits.sigmoid() if several else logits.softmax(1), atol=1e-5)
    for part in np.array_split(random.permutation(num), 4):
        found = predicted("new.npz", "--nodes", ",".join(map(str, part)))
        assert found[:2] == (part.tolist(), [classes[node] for node in part])
        np.testing.assert_allclose(found[2], whole[part], rtol=0, atol=1e-6)
    _, of_other, in_other = predicted("other.npz")
    assert of_other == [classes[node] for node in order]
    np.testing.assert_allclose(in_other, whole[order], rtol=0, atol=1e-6)
    Path("new.txt").write_text("\ufeff" + "\r\n".join(map(str, place[new])) + "\n")
    assert predicted("other.npz", "--nodes", "new.txt")[1] == [classes[node] for node in new]


def test_only_what_can_reach_the_nodes_is_computed():
    path = np.arange(5, 20)
    write_graph(edge_src=path[1:], edge_dst=path[:-1], edge_weight=path[1:])
    write_weights("gcn", symmetric=False, features="raw")  # of three layers
    options = PrepareConfig(partition="random", parts=8, symmetric=False)
    prepare_dataset("g.npz", Path("folder"), options)
    for data in ("g.npz", "folder"):
        config = PredictConfig(weights=Path("w.safetensors"), data=data, nodes="5", threads=1)
        samples = NodeSamples.of(config, data, "all")
        assert samples.graph.num_nodes == 4
        assert samples.graph.numbers_of(np.arange(4)).tolist() == [5, 6, 7, 8]
        assert samples.graph.edge_weights is not None
        assert sorted(np.asarray(samples.graph.edge_weights)) == [6, 7, 8]


def test_labels_need_not_be_of_all_classes_and_score_without_a_split(capsys):
    write_graph()
    job = write_weights()
    right = logits_of(job).argmax(1).numpy()
    y = np.full(NUM_NODES, -1)
    y[10:16] = [1, 0, 1, 0, 1, 1]
    names = np.array(["cow", "ant"])
    labels = np.array([2, 0])[y]
    for classes, of_file in ((names, y), (None, np.where(y == -1, -1, labels))):
        write_graph("few.npz", y=of_file, split=None, classes=classes)
        line = ["predict", *OURS.split(), "--data", "few.npz", "--format", "csv"]
        assert main([*line, "--threads", "1"]) == 0
        stdout, stderr = capsys.readouterr()
        assert [row.split(",")[2] for row in stdout.splitlines()[1:]] == [CLASSES[i] for i in right]
        share = (right == labels)[y >= 0].mean()
        assert "score of 6 test nodes: loss" in stderr
        assert f"accuracy {share:.2%}" in stderr
        takes = "few.npz does not name its classes: they are taken to be ant, bee, cow"
        assert (takes in stderr) == (classes is None)


def test_weights_of_edges_count_as_in_training_or_are_refused(capsys):
    weights = np.arange(1, 121) / 40
    write_graph(edge_weight=weights)
    job = write_weights("gcn")
    assert "directed edges with weights" in job.description
    expected = logits_of(job).double().softmax(1).amax(1)
    found = [row["top"][0]["probability"] for row in told(capsys)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    write_graph("plain.npz")
    write_graph("same.npz", edge_weight=weights / weights)
    of_same = [row["top"][0]["probability"] for row in told(capsys, data="same.npz")]
    assert np.abs(np.subtract(found, of_same)).max() > 1e-3
    given = ["predict", *OURS.split(), "--data", "plain.npz"]
    assert "trained with weights of edges, unlike this graph; save them" in refused(capsys, *given)
    with pytest.raises(InputError, match="--aggregator max: takes a maximum, in which the weights"):
        write_weights("sage")
    write_graph()
    write_weights("gcn")
    facts = read_metadata(Path("w.safetensors"))
    del facts["edge_weights"]  # as in earlier versions
    save_weights(Path("w.safetensors"), job.make_model().state_dict(), facts)
    assert told(capsys)
    given = ["predict", *OURS.split(), "--data", "same.npz"]
    assert "trained without weights of edges, unlike this graph; leave" in refused(capsys, *given)


def test_a_loaded_model_takes_what_its_transform_makes_of_a_graph():
    write_graph()
    job = write_weights("gcn2")
    torch.manual_seed(5)
    loaded, transform, names = vigpipe.load_graph_model("w.safetensors")
    assert torch.initial_seed() == 5
    assert names == CLASSES
    with torch.no_grad():
        assert torch.equal(loaded(*transform("g.npz")), logits_of(job))
    write_graph("other.npz", num_features=3)
    with pytest.raises(InputError, match=r"other\.npz: has 3 features, but the model in w"):
        transform("other.npz")
    with pytest.raises(
        InputError, match=r"w\.safetensors: holds a .*, which is a model of a graph"
    ):
        vigpipe.predict("w.safetensors", "a.png")


def test_a_file_that_claims_more_than_it_holds_is_refused():
    write_graph()
    write_weights("gcn")
    for num_classes, message in (("", "num_classes as nothing"), (str(1 << 30), r"convs\.0")):
        facts = {**read_metadata(Path("w.safetensors")), "num_classes": num_classes}
        facts.pop("class_names", None)
        save_weights(Path("w.safetensors"), {"convs.0.bias": torch.zeros(1)}, facts)
        with pytest.raises(InputError, match=message):
            vigpipe.load_graph_model("w.safetensors")


def test_other_nodes_do_not_change_the_tfidf_of_a_node(capsys):
    random = np.random.default_rng(1)
    x = random.random((NUM_NODES, 5)) * (random.random((NUM_NODES, 5)) < 0.4)
    alone: dict[str, Any] = {"edge_src": np.arange(NUM_NODES), "edge_dst": np.arange(NUM_NODES)}
    write_graph(x=x, **alone)
    write_graph("new.npz", x=np.where(np.arange(NUM_NODES)[:, None] < 10, x, 1), **alone)
    write_weights("sage", features="tfidf")
    _, transform, _ = vigpipe.load_graph_model("w.safetensors")
    before, after = (transform(name).x for name in ("g.npz", "new.npz"))
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    assert torch.equal(before[:10], after[:10])
    assert told(capsys)[:10] == told(capsys, data="new.npz")[:10]
    metadata = read_metadata(Path("w.safetensors"))
    del metadata["feature_weights"]
    save_weights(Path("w.safetensors"), write_weights().make_model().state_dict(), metadata)
    told_so = refused(capsys, "predict", *OURS.split(), "--data", "g.npz")
    assert "w.safetensors: was trained with --features tfidf and does not keep" in told_so
