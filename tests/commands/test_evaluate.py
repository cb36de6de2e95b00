"""`vigpipe evaluate`: scikit-learn's numbers, of the right images and nodes, for every layout."""

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import classification_report, confusion_matrix, roc_auc_score

import vigpipe
from tests.commands.graphs import logits_of, write_graph, write_weights
from tests.commands.refusals import check_commands, refused
from tests.world import run_command
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.data import open_source
from vigpipe.graphs.graph import TEST
from vigpipe.inference.judged import Judged
from vigpipe.inference.results import Results
from vigpipe.model.variants import create_model

NAMES = ("gnu", "bee", "cat", "ant", "dog", "eel", "fly")  # by the model's labels
OURS = "--weights w.safetensors --data pictures"


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    """Pictures of six of a model's seven classes, which their folders name."""
    monkeypatch.setattr("vigpipe.launch.local.preload", lambda *modules: None)
    random = np.random.default_rng(0)
    for name in sorted(NAMES)[:6]:
        folder = here / "pictures" / name
        folder.mkdir(parents=True)
        for i in range(5):
            pixels = random.integers(0, random.integers(1, 257, 3), (9, 8, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    save(NAMES)


def pictures() -> list[Path]:
    return sorted(Path("pictures").glob("*/*.png"))


def save(names, path="w.safetensors", **facts):
    torch.manual_seed(0)
    model: Any = create_model("vig_digits", num_classes=len(names)).eval()
    pixels = [np.asarray(Image.open(path))[:8] / 255 for path in pictures()]
    images = torch.tensor(np.stack(pixels), dtype=torch.float32).movedim(-1, 1)
    with torch.no_grad():  # or all images would be of one class
        model.prediction[4].bias.sub_(model(images).mean(0))
    facts = {"model": "vig_digits", "num_classes": str(len(names)), "in_chans": "3", **facts}
    facts |= {"img_size": "8x8", "class_names": json.dumps(names)}
    save_weights(Path(path), model.state_dict(), facts)


def told(capsys, rest: str) -> dict:
    assert main(["evaluate", *rest.split(), "--format", "json", "--threads", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def check_against_sklearn(row, labels, predicted, names, unit):
    """Compare with scikit-learn's report to the last digit, and its table."""
    rules: Any = {"output_dict": True, "zero_division": 0}
    report: Any = classification_report(
        labels, predicted, labels=range(len(names)), target_names=names, **rules
    )
    occur = [of["label"] for of in row["classes"]]
    for of in row["classes"]:
        theirs = report[of["class"]]
        ours = [of["precision"], of["recall"], of["f1"], of[unit]]
        assert ours == [theirs[n] for n in ("precision", "recall", "f1-score", "support")]
        assert names[of["label"]] == of["class"]
    summary: Any = classification_report(labels, predicted, labels=occur, **rules)
    for kind in set(summary) & {"micro avg", "macro avg", "weighted avg"}:
        ours = [row[kind.split()[0]][name] for name in ("precision", "recall", "f1")]
        assert ours == [summary[kind][name] for name in ("precision", "recall", "f1-score")]
    if np.ndim(labels) == 1:
        assert row["confusion"]["classes"] == [names[label] for label in occur]
        theirs = confusion_matrix(labels, predicted, labels=occur)
        assert row["confusion"]["rows"] == theirs.tolist()


def outcome():
    """The labels of the pictures, and the logits of the loaded model, one by one."""
    model, transform, names = vigpipe.load("w.safetensors")
    paths = pictures()
    with torch.no_grad():
        logits = torch.cat([model(transform(path)[None]) for path in paths]).double()
    return torch.tensor([names.index(path.parent.name) for path in paths]), logits


@pytest.mark.multiprocess
def test_images_are_scored_as_by_scikit_learn_on_one_rank_and_on_two_by_two(capsys):
    row = told(capsys, f"{OURS} --batch-size 7 --microbatches 4")
    labels, logits = outcome()
    assert row["images"] == 30
    assert row["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert row["top1"] == (logits.argmax(1) == labels).double().mean().item()
    near = (logits.topk(5).indices == labels[:, None]).any(1)
    assert row["top5"] == near.double().mean().item()
    assert len({*logits.argmax(1).tolist()}) > 2
    check_against_sklearn(row, labels.numpy(), logits.argmax(1).numpy(), NAMES, "images")
    words = f"evaluate {OURS} --batch-size 7 --threads 1 --format json --stages 2 --dp 2"
    line = [sys.executable, "-m", "vigpipe", *words.split(), "--microbatches", "2"]
    done = run_command(line)
    assert done.returncode == 0, done.stderr
    several = json.loads(done.stdout)
    assert several.pop("loss") == pytest.approx(row.pop("loss"), rel=1e-6)
    assert several == row


def test_the_score_is_that_of_the_training(capsys, tmp_path):
    assert main(["train", "--steps", "3", "--out", "run", "--threads", "1"]) == 0
    capsys.readouterr()
    row = told(capsys, "--weights run/model.safetensors --data digits")
    test = json.loads(Path("run/summary.json").read_text())["test"]
    assert {name: row[name] for name in ("images", "top1", "top5")} == {
        name: test[name] for name in ("images", "top1", "top5")
    }
    assert row["loss"] == pytest.approx(test["loss"], rel=1e-5)


def test_a_single_class_that_a_node_may_have_is_scored_by_those_who_have_it():
    has = np.array([[True], [True], [False], [False]])
    predicted = np.array([[True], [False], [True], [False]])
    nothing = np.zeros(0)
    rest = np.ones(4), nothing, predicted + 0.0, nothing, np.ones((4, 1), bool)
    judged = Judged(has, predicted, *rest)
    assert judged.by_class.averages["macro"]["f1"] == 0.5
    none = Judged(has & False, has & False, *rest)
    text = Results("d", "test", "w", "m", "nodes", ("a",), none).summary
    assert text == "loss 1.0000, accuracy 100.00%, macro-F1 0.00%, micro-F1 0.00%, ROC-AUC –"


@pytest.mark.parametrize("several", [False, True])
def test_nodes_are_scored_as_by_scikit_learn(several, capsys):
    write_graph(several=several)
    job = write_weights()
    nodes, names = job.graph.nodes_of(TEST), job.graph.class_names
    logits, labels = logits_of(job)[nodes].double(), job.graph.labels[nodes]
    row = told(capsys, "--weights w.safetensors --data g.npz")
    assert row["nodes"] == len(nodes)
    if not several:
        predicted = logits.argmax(1).numpy()
        loss = F.cross_entropy(logits, torch.from_numpy(labels))
    else:
        predicted = (logits > 0).numpy()
        loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels).double())
        areas = [roc_auc_score(labels[:, i], logits[:, i]) for i in range(len(names))]
        assert [of["roc_auc"] for of in row["classes"]] == areas
        assert row["roc_auc"] == row["macro"]["roc_auc"] == pytest.approx(np.mean(areas), rel=1e-15)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["accuracy"] == pytest.approx((predicted == labels).mean(), rel=1e-15)
    check_against_sklearn(row, labels, predicted, names, "nodes")
    assert (
        main(["evaluate", "--weights", "w.safetensors", "--data", "g.npz", "--page", "n.html"]) == 0
    )
    assert "Worst mistakes" in Path("n.html").read_text()
    assert capsys.readouterr().out.startswith(f"g.npz: {len(nodes)} test nodes, by sage of w.")


def test_what_is_not_known_of_a_node_is_in_no_number(capsys):
    random = np.random.default_rng(1)
    has, is_known = random.random((2, 40, 3)) < [[[0.4]], [[0.7]]]
    write_graph(y=np.where(is_known, has, np.nan))
    job = write_weights()
    nodes = job.graph.nodes_of(TEST)
    logits = logits_of(job)[nodes].double()
    labels, known, predicted = has[nodes], is_known[nodes], (logits > 0).numpy()
    row = told(capsys, "--weights w.safetensors --data g.npz")
    losses = F.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(labels).double(), reduction="none"
    )
    expected = losses.numpy()[known].sum() / labels.size
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert row["accuracy"] == (predicted == labels)[known].mean()
    for of in row["classes"]:
        some, label = known[:, of["label"]], of["label"]
        pairs = labels[some, label], predicted[some, label]
        report: Any = classification_report(*pairs, output_dict=True, zero_division=0)
        ours = [of["precision"], of["recall"], of["f1"], of["nodes"]]
        assert ours == [report["True"][n] for n in ("precision", "recall", "f1-score", "support")]
        assert of["roc_auc"] == roc_auc_score(pairs[0], logits[some, label])


def test_text_and_csv_have_a_row_for_each_class_and_the_page_the_worst_mistakes(capsys):
    assert main(["evaluate", *OURS.split(), "--page", "p.html"]) == 0
    stdout, stderr = capsys.readouterr()
    (unsplit, absent, opened) = stderr.splitlines()
    assert unsplit.startswith("vigpipe: note: pictures has no test images: all are scored; --test")
    assert absent == "vigpipe: note: without images: 1 class (gnu)"
    assert opened == "vigpipe: p.html: open it in a browser"
    first, second, *_ = stdout.splitlines()
    assert first == "pictures: 30 test images, by vig_digits of w.safetensors"
    assert re.fullmatch(r"loss \d+\.\d{4}, top-1 \d+\.\d\d%, top-5 \d+\.\d\d%", second)
    assert main(["evaluate", *OURS.split(), "--format", "csv", "--page", "p.html"]) == 0  # its own
    rows = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert rows[-1]["class"] == "weighted average"
    assert sum(int(row["images"]) for row in rows[:-2]) == 30
    labels, logits = outcome()
    wrong = (logits.argmax(1) != labels).nonzero().flatten().tolist()
    losses = F.cross_entropy(logits, labels, reduction="none")
    worst = sorted(wrong, key=lambda i: -losses[i])
    paths = [str(path) for path in pictures()]
    shown = re.findall(r'class="path">([^<]+)<', Path("p.html").read_text())
    assert shown == [paths[i] for i in worst]


def test_few_classes_have_no_top5_and_many_a_list_of_the_frequent_mistakes(capsys):
    save(("ant", "bee", "cat", "dog", "eel"), "five.safetensors")
    Path("pictures/fly").rename("fly")
    assert "top5" not in told(capsys, "--weights five.safetensors --data pictures")
    labels = np.arange(60) % 30
    predicted = np.where(labels < 2, labels + 1, labels)
    judged = Judged(labels, predicted, labels + 0.5, labels > 0, *[labels / 60] * 3)
    names = tuple(f"class {i}" for i in range(30))
    text = Results("d", "test", "w", "m", "images", names, judged).as_text()
    *_, title, _, head, _, first, second = text.splitlines()
    assert (title, head.split()) == (
        "The most frequent mistakes:",
        ["class", "predicted", "images"],
    )
    assert [first.split(), second.split()] == [
        ["class", "0", "class", "1", "2"],
        ["class", "1", "class", "2", "2"],
    ]


def test_a_split_is_chosen_and_classes_without_names_go_by_their_number(capsys):
    for split in ("train", "test"):
        Path("d", split).mkdir(parents=True)
        for name in sorted(NAMES):
            Path("d", split, name).mkdir()
            Image.new("L", (8, 8), 60).save(Path("d", split, name, "0.png"))
    data = "--weights w.safetensors --data d"
    numbers = {split: told(capsys, f"{data} --split {split}") for split in ("train", "test")}
    assert [(row["images"], row["top1"]) for row in numbers.values()] == [(7, 1 / 7)] * 2
    held_out = told(capsys, f"{OURS} --test 0.2 --seed 5")
    assert held_out["images"] == 6  # of 30, one of each class
    save([str(i) for i in range(7)], "n.safetensors")
    assert main(["evaluate", "--weights", "n.safetensors", "--data", "d", "--format", "csv"]) == 0
    stderr = capsys.readouterr().err
    assert "note: n.safetensors does not name its classes: they are taken to be ant, bee" in stderr


def test_wrong_use_is_told_in_one_sentence(capsys, here):
    for path in ("foreign.html", "hollow/ant/a.txt"):
        Path(path).parent.mkdir(exist_ok=True, parents=True)
        Path(path).write_text("mine")
    save(("ant", "bee"), "two.safetensors")
    save([str(i) for i in range(10)], "ten.safetensors")
    write_graph("g.npz")
    rows = [
        ("--weights w.safetensors", "--data"),
        ("--data pictures", "--weights"),
        (f"{OURS} --page foreign.html", "--page foreign.html: is there already"),
        (f"{OURS} --page p.txt", "must end in .html or .htm"),
        (f"{OURS} --split all", "--split all: pictures has no such images; choose one of train"),
        (f"{OURS} --test 1", "--test 1.0: must be a share"),
        (f"{OURS} --dp 0", "--dp 0"),
        (f"{OURS} --seed 1", "--seed 1: is that of --test"),
        (f"{OURS} --split validation --test 0.2", "pictures has no such images"),
        ("--weights w.safetensors --data fake", "noise"),
        ("--weights w.safetensors --data hollow", "class 'ant' has no images"),
        ("--weights w.safetensors --data none", "none: no such data"),
        ("--weights w.safetensors --data g.npz", "g.npz"),
        ("--weights ten.safetensors --data digits", "have 1 channel, and those of the model"),
        ("--weights ten.safetensors --data pictures", "has 6 classes, and the model in ten"),
        (
            "--weights two.safetensors --data pictures",
            "has 4 classes (cat, dog, eel, fly), which the model in two.safetensors does not know",
        ),
    ]
    check_commands(capsys, "evaluate", rows)
    Path("pictures/ant/1.png").write_bytes(b"no picture")
    assert main(["evaluate", *OURS.split()]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "vigpipe: pictures/ant/1.png: cannot be read as an image" in stderr
    assert main(["evaluate", *OURS.split(), "--skip-bad-images"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith("pictures: 29 test images")
    row = told(capsys, f"{OURS} --skip-bad-images --test 0.4 --seed 3")
    held_out = open_source("pictures", test=0.4, seed=3, skip_bad_images=True).test
    assert row["images"] == len(held_out) == 12  # those that a run holds out, which reads no others
    assert "left out as unreadable: 1 image (pictures/ant/1.png)" in stderr


def test_predictions_say_their_score_and_are_written_as_arrays(capsys):
    line = ["predict", "--weights", "w.safetensors", "pictures", "--format", "csv"]
    assert main([*line, "--logits", "l.npz", "--embeddings", "e.npz", "--batch-size", "4"]) == 0
    stdout, stderr = capsys.readouterr()
    labels, logits = outcome()
    top1 = (logits.argmax(1) == labels).double().mean().item()
    told_so = f"score of 30 images, whose folders name their classes: loss .*, top-1 {top1:.2%}, "
    assert re.match(f"vigpipe: {told_so}", stderr)
    rows = [*csv.DictReader(io.StringIO(stdout))]
    assert [row["predicted"] for row in rows] == [NAMES[i] for i in logits.argmax(1)]
    assert [*rows[0]][:4] == ["image", "predicted", "class1", "probability1"]
    with np.load("l.npz") as arrays:
        np.testing.assert_allclose(arrays["logits"], logits, atol=1e-3)
        assert arrays["images"].tolist() == [row["image"] for row in rows]
        assert arrays["class_names"].tolist() == [*NAMES]
    loaded: Any = vigpipe.load("w.safetensors")
    images = torch.stack([loaded.transform(row["image"]) for row in rows])
    with torch.no_grad():
        pooled = loaded.model.forward_features(images).mean((1, 2))
    with np.load("e.npz") as arrays:
        np.testing.assert_allclose(arrays["embeddings"], pooled, atol=1e-4)
    assert "--logits l.npz: is there already" in refused(capsys, *line, "--logits", "l.npz")
    same = ["--logits", "m.npz", "--embeddings", "m.npz"]
    assert "--embeddings m.npz: is --logits, too" in refused(capsys, *line, *same)


@pytest.mark.parametrize("model", ["sage", "gcn2"])
def test_embeddings_of_nodes_are_what_the_last_layer_takes(model, capsys):
    write_graph()
    job = write_weights(model)
    line = "predict --weights w.safetensors --data g.npz --split test --format json"
    assert main([*line.split(), "--embeddings", "e.npz"]) == 0
    loaded: Any = vigpipe.load_graph_model("w.safetensors")
    graph_model = loaded.model
    taken = []
    last = graph_model.readout if model == "gcn2" else graph_model.convs["1"]
    last.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    with torch.no_grad():
        graph_model(*loaded.transform("g.npz"))
    nodes = job.graph.nodes_of(TEST)
    with np.load("e.npz") as arrays:
        np.testing.assert_allclose(arrays["embeddings"], taken[0][nodes], atol=1e-5)
        assert arrays["nodes"].tolist() == nodes.tolist()
    capsys.readouterr()
    write_weights("sage", layers=1)
    assert "has one layer" in refused(capsys, *line.split(), "--embeddings", "f.npz")
