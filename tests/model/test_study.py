"""The study's model against torch-geometric's GraphConv, and against the study's figures."""

import pytest
import torch

from tests.reference import PygStudy, assert_same_outcome
from vigpipe.errors import InputError
from vigpipe.model.study import VigStudy
from vigpipe.model.variants import create_model
from vigpipe.ops.grid import grid_neighbour_sum


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


def test_parameters_of_a_block_the_readout_and_the_whole():
    model = VigStudy()
    assert [count(block) for block in model.blocks.values()] == [138_258] * 8
    assert count(model.fc1) + count(model.fc2) == 14_346
    assert count(model) == 1_120_410
    assert count(VigStudy(graph="knn")) == 1_120_410


def test_eight_other_nodes_need_nine_pixels():
    VigStudy(img_size=(3, 3), graph="knn")
    with pytest.raises(InputError, match=r"8 \* 1 = 8 neighbours of 7 candidates \(N = 8 nodes"):
        VigStudy(img_size=(2, 4), graph="knn")
    VigStudy(img_size=(2, 4), graph="grid")


def test_other_images_and_classes_fit():
    model = VigStudy(3, 4, (3, 7))
    assert model(torch.rand(2, 4, 3, 7)).shape == (2, 3)
    assert model.boundary_shapes(3) == ((21, 4),)


def test_images_of_another_size_are_refused():
    """Symptom: fewer pixels than the grid has nodes; C++ wrote behind them, and Python crashed."""
    model = create_model("vig_study", num_classes=3, in_chans=3, img_size=8)
    with pytest.raises(InputError, match="images of 4x4 pixels, expected 8x8"):
        model(torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"8 x 8 nodes are expected \(got 16\)"):
        grid_neighbour_sum(torch.zeros(2, 16, 3), 8, 8)
