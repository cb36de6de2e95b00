"""From a variant and its policies to blocks: who makes a graph, who is given one."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.refusals import check_refusals
from vigpipe.model.blocks import FewNodesWarning, VigShape, make_block_specs, stem_strides
from vigpipe.model.variants import create_model

pytestmark = pytest.mark.filterwarnings("ignore::vigpipe.model.blocks.FewNodesWarning")

SIX = VigShape((6,), (8,), k=(3, 8))
PYRAMID = VigShape((3, 3), (8, 16), k=(3, 8), reductions=(2, 1))


def specs(graph, shape=SIX, aggregator="max"):
    return make_block_specs(shape, graph, aggregator, 0.0, (8, 8))


def model_of(name, **options) -> Any:
    return create_model(name, num_classes=3, **options).eval()


def given(graph, shape=SIX):
    return [spec.num_given for spec in specs(graph, shape)]


def test_a_graph_is_handed_on_with_the_k_of_its_maker():
    assert given("knn") == [0] * 6
    assert given("knn,reuse,reuse") == [0, 3, 3, 0, 6, 6]
    # k is 3, 4, 5, 6, 7, 8; each block uses what the one before has made.
    assert given("lookahead") == [0, 3, 4, 5, 6, 7]
    assert given("knn,lookahead,reuse") == [0, 3, 4, 0, 6, 7]


def test_a_block_looks_ahead_only_if_the_next_one_wants_it():
    makes = [spec.rule.makes_next for spec in specs("knn,lookahead,lookahead") if spec.rule]
    assert makes == [False, True, False] * 2
    blocks = specs("lookahead", PYRAMID)
    assert [b.rule.makes_next for b in blocks if b.rule] == [False, True, False] * 2


def test_graphs_that_follow_from_the_place_are_made_again_instead_of_handed_on():
    blocks = specs("grid,reuse,pattern,reuse")
    made = [spec.rule.policy for spec in blocks if spec.rule]
    assert made == ["grid", "grid", "pattern", "pattern", "grid", "grid"]
    assert given("grid,reuse,pattern,reuse") == [0] * 6


def test_unknown_names_are_errors():
    rows = (
        ("knn,nearest", "max", "--graph knn,nearest: 'nearest' is not one of knn, window, grid"),
        ("knn", "mean", "--aggregator mean: 'mean' is not one of max, edge, sage, gin, maxmean"),
    )
    check_refusals(
        (partial(specs, graph, aggregator=aggregator), words) for graph, aggregator, words in rows
    )


def test_strides_of_two_come_late_but_not_last_and_others_are_errors():
    assert stem_strides(5, 16) == (2, 2, 2, 2, 1)
    assert stem_strides(5, 4) == (1, 1, 2, 2, 1)
    assert stem_strides(3, 1) == (1, 1, 1)
    words = "--stem-stride {}: .* power of two up to 16"
    check_refusals((partial(stem_strides, 5, n), words.format(n)) for n in (0, 3, 32))


# ---- images of any size ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compat"),
    [("vig_digits", None), ("pvig_cifar_ti", None), ("pvig_cifar_ti", "reference")],
)
def test_a_model_takes_images_of_another_size_than_its_own(name, compat):
    model = model_of(name, img_size=(16, 16), compat=compat)
    with torch.no_grad():
        model.pos_embed.normal_()
    for size in ((16, 16), (12, 20), (17, 9), (1, 1)):
        resized = model_of(name, img_size=(16, 16), compat=compat)
        resized.load_state_dict(model.state_dict())
        resized.set_input_size(size)
        images = torch.rand(2, 3, *size)
        assert torch.equal(model(images), resized(images))
        assert resized.img_size == size
        assert tuple(resized.pos_embed.shape[2:]) == resized.grid
    model.set_input_size(img_size=12)
    assert model.img_size == (12, 12)


def test_too_few_nodes_are_told_once_with_numbers():
    expected = (
        r"images of 32x32 give too few nodes for k \* dilation in 12 of 12 blocks: the last "
        r"chooses from 4 nodes and takes k = 4, dilation = 1 instead of 18, 3"
    )
    with pytest.warns(FewNodesWarning, match=expected) as caught:
        model = create_model("vig_ti_224", num_classes=2, img_size=32)
    assert len(caught) == 1
    model.eval()
    images = torch.rand(1, 3, 48, 16)
    with pytest.warns(FewNodesWarning, match="images of 48x16") as caught:
        torch.stack([model(images), model(images)])
    assert len(caught) == 1


def test_no_preset_has_too_few_nodes(recwarn):
    with torch.device("meta"):
        for name in ("vig_cifar_ti", "pvig_cifar_ti", "vig_digits", "pvig_b_224"):
            create_model(name, num_classes=10)
    assert not recwarn.list


def test_stem_stride_decides_the_number_of_nodes_and_no_weight():
    shapes = []
    for stride in (16, 8, 1):
        with torch.device("meta"):
            model = create_model("vig_ti_224", num_classes=2, img_size=(64, 48), stem_stride=stride)
        assert model.boundary_shapes(0) == ((64 // stride, 48 // stride, 192),)
        state = model.state_dict()
        del state["pos_embed"]
        shapes.append({name: tensor.shape for name, tensor in state.items()})
    assert shapes[0] == shapes[1] == shapes[2]
