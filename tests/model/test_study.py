"""The study's model against torch-geometric's GraphConv, and against the study's figures."""

import re

import pytest
import torch

from tests.reference import PygStudy, assert_same_outcome, grid_edges
from vigpipe.config.choices import NORMS
from vigpipe.errors import InputError
from vigpipe.model.study import VigStudy


def random_images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("graph", ["grid", "knn"])
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


def test_the_knn_graph_has_no_parameters():
    assert count(VigStudy(graph="knn")) == 1_120_410


def test_parameters_have_the_names_of_the_study():
    shapes = {re.sub(r"\.\d\.(?=grapher|ffn)", ".i.", n): [*p.shape] for n, p in named(VigStudy())}
    expected = {
        "blocks.i.grapher.fc1.0.weight": [256, 3],
        "blocks.i.grapher.fc1.0.bias": [256],
        "blocks.i.grapher.fc1.1.weight": [256],
        "blocks.i.grapher.fc1.1.bias": [256],
        "blocks.i.grapher.graph_conv.lin_rel.weight": [256, 256],
        "blocks.i.grapher.graph_conv.lin_rel.bias": [256],
        "blocks.i.grapher.graph_conv.lin_root.weight": [256, 256],
        "blocks.i.grapher.fc2.0.weight": [3, 256],
        "blocks.i.grapher.fc2.0.bias": [3],
        "blocks.i.grapher.fc2.1.weight": [3],
        "blocks.i.grapher.fc2.1.bias": [3],
        "blocks.i.ffn.fc1.0.weight": [512, 3],
        "blocks.i.ffn.fc1.0.bias": [512],
        "blocks.i.ffn.fc1.1.weight": [512],
        "blocks.i.ffn.fc1.1.bias": [512],
        "blocks.i.ffn.fc2.0.weight": [3, 512],
        "blocks.i.ffn.fc2.0.bias": [3],
        "blocks.i.ffn.fc2.1.weight": [3],
        "blocks.i.ffn.fc2.1.bias": [3],
        "fc1.weight": [1024, 3],
        "fc1.bias": [1024],
        "fc2.weight": [10, 1024],
        "fc2.bias": [10],
    }
    assert shapes == expected


def named(model):
    return list(model.named_parameters())


@pytest.mark.parametrize("graph", ["grid", "knn"])
@pytest.mark.parametrize("norm", NORMS)
def test_every_parameter_gets_a_gradient(norm, graph):
    model = VigStudy(
        img_size=(4, 3), norm=norm, graph=graph, drop_path_rate=0.1, drop_rate=0.1
    ).double()
    model(random_images(3, 3, 4, 3), torch.arange(3)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.dim() == 1 or parameter.grad.any(), name


def test_eight_other_nodes_need_nine_pixels():
    VigStudy(img_size=(3, 3), graph="knn")
    with pytest.raises(InputError, match=r"8 \* 1 = 8 neighbours of 7 candidates \(N = 8 nodes"):
        VigStudy(img_size=(2, 4), graph="knn")
    VigStudy(img_size=(2, 4), graph="grid")


@pytest.mark.parametrize(("channels", "classes", "size"), [(1, 10, (8, 8)), (4, 3, (3, 7))])
def test_other_images_and_classes_fit(channels, classes, size):
    model = VigStudy(classes, channels, size)
    assert model(torch.rand(2, channels, *size)).shape == (2, classes)
    assert model.boundary_shape(3) == (size[0] * size[1], channels)
