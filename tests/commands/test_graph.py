"""`vigpipe graph`: the right edges in the right blocks, and what is refused."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands.refusals import check_commands, refused
from tests.inference.test_drawing import pixels_of
from tests.timing.test_timeline import text_of
from vigpipe.cli import main
from vigpipe.commands.graph import panel
from vigpipe.model.blocks import BlockSpec, GraphRule
from vigpipe.model.grapher import BlockGraph
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn


@pytest.fixture(autouse=True)
def here(here):
    """A working folder with one grey picture of noise."""
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (32, 32), dtype=np.uint8)).save("a.png")
    return here


def test_the_node_is_the_patch_under_the_pixel():
    neighbours = torch.arange(2 * 3).view(1, 6, 1)  # every node is its own only neighbour
    spec = BlockSpec(GraphRule("knn", 1), "max", ((2, 3), 8), 8, (2, 3), 0, 0)
    graph = BlockGraph(neighbours, (2, 3), (2, 3))
    for pixel, node in (((0, 0), (0, 0)), ((9, 9), (0, 0)), ((10, 10), (1, 1)), ((29, 19), (1, 2))):
        found = panel(0, graph, spec, pixel, (20, 30))
        assert (found.node, found.neighbours) == (node, (node,))


def test_the_edges_drawn_are_those_the_model_used(here):
    torch.manual_seed(0)
    model = create_model("pvig_cifar_ti", num_classes=10).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        _, graphs = model(images, return_graph=True)
    (height, width), (_, columns) = graphs[0].grid, graphs[0].candidates
    assert columns < width  # else this is no test of pooling
    assert isinstance(model, VisionGnn)
    found = panel(0, graphs[0], model.specs[0], (17, 6), (32, 32))
    assert (found.grid, found.candidates) == (graphs[0].grid, graphs[0].candidates)
    assert found.reduction == width // columns
    row, column = 6 * height // 32, 17 * width // 32
    assert found.node == (row, column)
    wanted = graphs[0].neighbours[0, row * width + column].tolist()
    assert [row * columns + column for row, column in found.neighbours] == wanted


LINE = ["graph", "--model", "vig_digits", "--image", "a.png"]


def test_first_middle_and_last_block_side_by_side(capsys):
    assert main(LINE) == 0
    told = capsys.readouterr().out
    assert told.startswith("graph.png: blocks 0, 2, 3 of vig_digits, node at pixel 4,4\n")
    assert told.count("random") == 1


def test_the_same_command_draws_the_same_picture(here):
    for name in ("one.png", "two.png"):
        assert main([*LINE, "--block", "1", "--node", "2,5", "--out", name]) == 0
        torch.rand(3)
    assert np.array_equal(pixels_of("one.png"), pixels_of("two.png"))


def test_every_policy_can_be_drawn_and_papers_get_vectors(here):
    line = [*LINE, "--graph", "grid,window,reuse,lookahead", "--block", "0,1,2,3"]
    for name in ("graph.pdf", "graph.SVG"):
        assert main([*line, "--out", name]) == 0
        assert (here / name).stat().st_size > 1000


def test_many_blocks_take_several_rows():
    line = ["graph", "--model", "pvig_cifar_ti", "--image", "a.png", "--image-size", "32x64"]
    assert main([*line, "--block", "0,1,3,4,6"]) == 0
    height, width, _ = pixels_of("graph.png").shape
    assert width == 3 * 540 + 4 * 15
    assert height == pytest.approx(112.5 + 2 * (270 + 67.5) + 15, abs=1)


def test_the_picture_names_the_image_the_weights_and_the_node(here, capsys):
    (here / "a.png").rename(here / "a $\\x$.png")
    torch.save(create_model("vig_digits", num_classes=3, in_chans=1).state_dict(), "w$_$.pth")
    line = ["graph", "--weights", "w$_$.pth", "--image", "a $\\x$.png", "--block", "3"]
    assert main([*line, "--node", "2,5", "--out", "graph.svg"]) == 0
    assert capsys.readouterr().out == "graph.svg: block 3 of vig_digits, node at pixel 2,5\n"
    text = text_of("graph.svg")
    assert "a $\\x$.png, node at pixel 2,5" in text
    assert "vig_digits, w$_$.pth" in text
    assert "node in row 5, column 2 of 8×8" in text


STUDY, PYRAMID = ("--model vig_study --image a.png", "--model pvig_cifar_ti --image a.png")
OURS = " ".join(LINE[1:])
WRONG = [
    ("--model vig_digits", "--image"),
    ("--image a.png", "--model", "--weights"),
    (STUDY, "vig_study", "vig_digits"),  # it has no such graphs
    (f"{OURS} --weights w.pth", "w.pth", "No such file"),
    (f"{OURS[:-5]} b.png", "b.png", "No such file"),
    (f"{OURS} --node 8,0", "--node 8,0", "8×8", "7,7"),
    (f"{OURS} --node centre", "--node centre", "4,4"),
    (f"{OURS} --block 1,4", "--block 4", "0 to 3"),
    (f"{OURS} --block=-1", "--block -1", "0-3"),
    (f"{OURS} --block last", "--block last", "0,3"),
    (f"{PYRAMID} --block 2", "--block 2", "no graph", "0-1, 3-4"),  # a downsampling
    (f"{OURS} --out graph.jpeg", "graph.jpeg", ".png"),
    (f"{OURS} --out a.png/b.png", "a.png/b.png", "cannot be written"),
    (f"{OURS} --out a.png", "a.png", "did not write it"),
    (f"{OURS} --out null.png", "null.png", "is a symbolic link"),
]


def test_wrong_use_is_told_in_one_sentence(capsys, here):
    (here / "text.png").write_text("no image")
    (here / "null.png").symlink_to("/dev/null")
    check_commands(capsys, "graph", WRONG)
    # The command has no --skip-bad-images.
    told = refused(capsys, "graph", *OURS[:-5].split(), "text.png")
    assert re.fullmatch(r"vigpipe: text\.png: .*\(not an image, .*\); repair or remove it", told)
