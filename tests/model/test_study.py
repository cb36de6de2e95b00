"""The study's model against torch-geometric's GraphConv, and against the study's figures."""

import re

import pytest
import torch

from tests.reference import PygStudy, assert_same_outcome, grid_edges
from vigpipe.errors import InputError
from vigpipe.model.study import VigStudy


def random_images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("graph", "dtype", "train"),
    [
        ("grid", torch.float64, True),
        ("grid", torch.float32, False),
        ("knn", torch.float64, False),
        ("knn", torch.float32, True),
    ],
)
def test_equal_to_torch_geometric(graph, dtype, train):
    theirs = PygStudy((6, 5), knn=graph == "knn")
    ours = VigStudy(img_size=(6, 5), graph=graph)
    assert_same_outcome(ours, theirs, random_images(3, 3, 6, 5), dtype, train)


def test_the_study_has_7812_edges_an_image():
    assert grid_edges(32, 32).shape == (2, 7_812)


def test_parameters_of_a_block_the_readout_and_the_whole():
    model = VigStudy()
    assert [count(block) for block in model.blocks.values()] == [138_258] * 8
    assert count(model.fc1) + count(model.fc2) == 14_346
    assert count(model) == 1_120_410
    assert count(VigStudy(graph="knn")) == 1_120_410


def test_parameters_have_the_names_of_the_study():
    shapes = {re.sub(r"\.\d\.(?=grapher|ffn)", ".i.", n): [*p.shape] for n, p in named(VigStudy())}
    expected = {
        "fc1.weight": [1024, 3],
        "fc1.bias": [1024],
        "fc2.weight": [10, 1024],
        "fc2.bias": [10],
    }
    for layer, weight in {
        "grapher.fc1.0": [256, 3],
        "grapher.fc1.1": [256],
        "grapher.graph_conv.lin_rel": [256, 256],
        "grapher.fc2.0": [3, 256],
        "grapher.fc2.1": [3],
        "ffn.fc1.0": [512, 3],
        "ffn.fc1.1": [512],
        "ffn.fc2.0": [3, 512],
        "ffn.fc2.1": [3],
    }.items():
        expected |= {f"blocks.i.{layer}.weight": weight, f"blocks.i.{layer}.bias": weight[:1]}
    expected["blocks.i.grapher.graph_conv.lin_root.weight"] = [256, 256]
    assert shapes == expected


def named(model):
    return list(model.named_parameters())


def test_eight_other_nodes_need_nine_pixels():
    VigStudy(img_size=(3, 3), graph="knn")
    with pytest.raises(InputError, match=r"8 \* 1 = 8 neighbours of 7 candidates \(N = 8 nodes"):
        VigStudy(img_size=(2, 4), graph="knn")
    VigStudy(img_size=(2, 4), graph="grid")


def test_other_images_and_classes_fit():
    model = VigStudy(3, 4, (3, 7))
    assert model(torch.rand(2, 4, 3, 7)).shape == (2, 3)
    assert model.boundary_shape(3) == (21, 4)
