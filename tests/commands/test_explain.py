"""`vigpipe explain`: what is printed, drawn and written, and what is refused."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from tests.commands.graphs import CLASSES, logits_of, write_graph, write_weights
from tests.commands.refusals import check_commands
from tests.inference.test_drawing import pixels_of
from tests.timing.test_timeline import text_of
from vigpipe.cli import main
from vigpipe.inference.explain.picture import AGAINST, FOR
from vigpipe.inference.load import load
from vigpipe.model.variants import create_model


@pytest.fixture(autouse=True)
def here(here):
    """A working folder with a picture of noise, and weights of a model of images."""
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (32, 32), dtype=np.uint8)).save("a.png")
    torch.manual_seed(0)
    torch.save(create_model("vig_digits", num_classes=3, in_chans=1).state_dict(), "w.pth")
    return here


LINE = ["explain", "--weights", "w.pth", "--image", "a.png"]


def strength(picture: np.ndarray, colour: str) -> int:
    """How many dots are closer to a colour than to white or grey."""
    return int((np.abs(picture - np.array(to_rgb(colour)) * 255).sum(-1) < 120).sum())


def test_an_image_is_explained_as_text_picture_and_arrays(capsys):
    assert main([*LINE, "--arrays", "e.npz", "--target", "2", "--most", "4"]) == 0
    told = capsys.readouterr().out
    model, transform, _ = load("w.pth")
    with torch.no_grad():
        logits = model(transform("a.png")[None])[0]
    assert told.startswith(f"a.png: 2 {logits.softmax(0)[2]:.2%}, logit {logits[2]:.4g}\n")
    assert told.endswith("\nexplain.png: nodes, and edges of blocks 0, 2, 3\n")
    arrays = np.load("e.npz")
    np.testing.assert_allclose(arrays["logits"], logits, rtol=1e-5)
    assert arrays["target"] == 2
    assert arrays["class_names"].tolist() == ["0", "1", "2"]
    for name in ("nodes_gradient", "nodes_drops"):
        assert arrays[name].shape == (8, 8)
    for block in range(4):
        assert f"\n{block:>7}  {arrays[f'block{block}_all_out']:>20.4g}  " in told
        shapes = {arrays[f"block{block}_{name}"].shape for name in ("neighbours", "gradient")}
        assert shapes == {(64, 9)}
        assert np.count_nonzero(~np.isnan(arrays[f"block{block}_drops"])) == 4
    strongest = np.abs(arrays["nodes_drops"]).argmax()
    row = f"\nrow {strongest // 8}, column {strongest % 8}  "
    assert told.index(row) < told.index("\nrow ", told.index(row) + 1)
    picture = pixels_of("explain.png")
    assert min(strength(picture, FOR), strength(picture, AGAINST)) > 100


def test_the_picture_names_what_is_explained(capsys):
    assert main([*LINE, "--block", "1", "--out", "e.svg"]) == 0
    text = text_of("e.svg")
    for words in ("a.png: ", "vig_digits, w.pth", "a node occluded", "block 1: 32 of 576 edges"):
        assert words in text, words
    assert main([*LINE, "--block", "1", "--out", "e.svg"]) == 0  # its own file is replaced
    assert capsys.readouterr().out.endswith("e.svg: nodes, and edges of block 1\n")


def test_squares_and_pooled_candidates_of_a_pyramid_and_the_study(capsys):
    torch.manual_seed(0)
    torch.save(create_model("pvig_cifar_ti", num_classes=3).state_dict(), "p.pth")
    line = ["explain", "--model", "pvig_cifar_ti", "--weights", "p.pth", "--image", "a.png"]
    assert main([*line, "--most", "1"]) == 0
    told = capsys.readouterr().out
    assert "2×2 nodes occluded, and the logit falls by" in told
    assert "\nrows " in told
    torch.save(create_model("vig_study", num_classes=3).state_dict(), "s.pth")
    line = ["explain", "--model", "vig_study", "--weights", "s.pth", "--image", "a.png"]
    assert main(line) == 0
    told = capsys.readouterr().out
    assert "only the edges of a ViG are explained" in told
    assert told.endswith("explain.png: nodes\n")


def test_a_node_is_explained_by_its_name_in_the_users_numbers(capsys):
    names = np.array([f"n{i}" for i in range(40)])
    write_graph(names=names)
    job = write_weights("gcn")
    line = ["explain", "--weights", "w.safetensors", "--data", "g.npz", "--node", "n7"]
    assert main([*line, "--arrays", "e.npz", "--target", "bee"]) == 0
    told = capsys.readouterr().out
    logits = logits_of(job)[7]
    assert told.startswith(f"n7 (node 7): bee {logits.softmax(0)[1]:.2%}, logit {logits[1]:.4g}\n")
    arrays = np.load("e.npz")
    assert arrays["class_names"].tolist() == list(CLASSES)
    assert (arrays["nodes"][0], arrays["steps"][0]) == (7, 0)
    assert set(arrays["layer2_targets"]) == {7}
    into = job.graph.indices[job.graph.indptr[7] : job.graph.indptr[8]]
    assert sorted(arrays["layer2_sources"]) == sorted(into)
    assert told.endswith("explain.png: nodes, and edges of layers 0, 1, 2\n")
    assert main([*line[:-1], "7", "--out", "e.svg"]) == 0
    text = text_of("e.svg")
    assert "n7" in text
    assert "layer 2: " in text


def test_a_prepared_folder_has_the_users_numbers_too(capsys):
    write_graph()
    write_weights("gcn")
    line = ["explain", "--weights", "w.safetensors", "--node", "7", "--data"]
    told = []
    assert main(["dataset", "prepare", "g.npz", "parts", "--parts", "4", "--features", "row"]) == 0
    for data in ("g.npz", "parts"):
        capsys.readouterr()
        assert main([*line, data]) == 0
        told.append(capsys.readouterr().out.replace(data, "DATA"))
    assert told[0] == told[1]


IMAGE, NODE = "--weights w.pth --image a.png", "--weights w.safetensors --data g.npz --node 1"
WRONG = [
    ("--image a.png", "--weights"),
    ("--weights w.pth", "neither given", "--node"),
    (f"{IMAGE} --data g.npz", "both given"),
    ("--weights w.safetensors --image a.png", "holds a sage", "--data"),
    ("--weights w.pth --data g.npz --node 1", "w.pth", "not a safetensors file"),
    ("--weights w.safetensors --data g.npz", "--node: is missing"),
    (f"{NODE} --model gcn", "--model gcn", "that of the weights"),
    ("--weights w.safetensors --data t.npz --node twin", "several nodes of that name", "3 or 4"),
    ("--weights w.safetensors --data h.npz --node 1", "h.npz", "No such file"),
    (f"{NODE} --image-size 8", "--image-size 8", "is for an image"),
    (f"{IMAGE} --node 3", "--node 3", "is for the node of a graph"),
    (f"{NODE[:-1]} 40", "--node 40", "0 to 39"),
    (f"{NODE[:-1]} cat", "--node cat", "0 to 39"),
    (f"{NODE} --block 2", "--block 2", "layers 0 to 1"),
    (f"{NODE} --block x", "--block x", "numbers of layers"),
    (f"{NODE} --target cat", "--target cat", "ant", "cow"),
    (f"{IMAGE} --target 3", "--target 3", "0 to 2"),
    (f"{IMAGE} --most 0", "--most 0", "at least 1"),
    (f"{IMAGE} --block 4", "--block 4", "0 to 3"),
    (f"{IMAGE} --image-size 0", "--image-size", "0"),
    (f"{IMAGE} --seed 1", "--seed 1", "is for the node of a graph"),
    (f"{IMAGE} --out e.jpeg", "e.jpeg", ".png"),
    (f"{IMAGE} --out a.png", "a.png", "did not write it"),
    (f"{IMAGE} --arrays e.txt", "e.txt", ".npz"),
    (f"{IMAGE} --arrays g.npz", "g.npz", "is there already"),
    ("--weights w.pth --image b.png", "b.png", "No such file"),
    (
        "--weights s.pth --model vig_study --image a.png --block 1",
        "--block 1",
        "only the edges of a ViG",
    ),
    ("--weights inf.pth --image a.png", "a.png", "NaN or infinite"),
]


def test_wrong_use_is_told_in_one_sentence(capsys):
    names = [f"n{i}" for i in range(40)]
    write_graph("t.npz", names=np.array([*names[:3], "twin", "twin", *names[5:]]))
    write_graph()
    write_weights("sage")
    torch.save(create_model("vig_study", num_classes=3).state_dict(), "s.pth")
    state = create_model("vig_digits", num_classes=3, in_chans=1).state_dict()
    weight = state["prediction.4.weight"]
    torch.save({**state, "prediction.4.weight": torch.full_like(weight, 3e38)}, "inf.pth")
    check_commands(capsys, "explain", WRONG)
