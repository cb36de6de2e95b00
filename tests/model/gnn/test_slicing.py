"""Tables of graph models: every tensor is there, shapes are those of narrow models, and so is y."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.model.gnn.graphs import random_adjacency
from tests.model.test_slicing import draw, load_slices, zero_others
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.slicing import Slicing

KINDS: dict[str, tuple[Any, str | None, int]] = {  # model, aggregator, heads
    "gcn": ("gcn", None, 1),
    "mean": ("sage", "mean", 1),
    "max": ("sage", "max", 1),
    "pool": ("sage", "pool", 1),
    "gat": ("gat", "v1", 1),
    "gat of 2": ("gat", "v1", 2),
    "gatv2 of 2": ("gat", "v2", 2),
    "gin": ("gin", None, 1),
    "gcn2": ("gcn2", None, 1),
}
every = pytest.mark.parametrize("kind", KINDS)
IN, CLASSES, WIDTH = 12, 5, 32


def build(kind: str, norm: Any = "none", num=1, in_channels=IN, layers=3) -> Any:
    name, aggregator, heads = KINDS[kind]
    return create_graph_model(
        name,
        in_channels=in_channels,
        num_classes=CLASSES,
        num_layers=layers,
        width=WIDTH // num,
        heads=heads,
        aggregator=aggregator,
        norm=norm,
    )


@every
def test_shapes_are_those_of_narrow_models(kind):
    for norm, layers, partition_input in (
        ("none", 1, True),
        ("none", 1, False),
        ("batch", 2, False),
        ("batch", 3, True),
        ("layer", 2, True),
        ("layer", 3, False),
    ):
        with torch.device("meta"):
            model = build(kind, norm, layers=layers)
            wide, slicing = model.state_dict(), model.slicing(partition_input)
            assert slicing.sides.keys() == wide.keys()
            for num in (1, 2, 4):
                inputs = IN // num if partition_input else IN
                narrow = build(kind, norm, num, inputs, layers).state_dict()
                shapes = {key: slicing.shape(key, tuple(t.shape), num) for key, t in wide.items()}
                assert shapes == {key: t.shape for key, t in narrow.items()}, (norm, layers)


def test_a_tensor_without_sides_and_sides_without_a_tensor_are_refused():
    model = build("gcn")
    model.register_buffer("another", torch.zeros(3))
    with pytest.raises(ValueError, match="either no tensor or no sides: another"):
        model.slicing()
    tensors, sides = build("gcn").state_dict(), build("gcn").slicing().sides
    with pytest.raises(ValueError, match=r"no sides: convs\.0\.bias"):
        Slicing.of({key: tensors[key] for key in tensors if key != "convs.0.bias"}, sides)
    tensors["convs.0.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match="a side has"):
        Slicing.of(tensors, sides)


@every
@torch.no_grad()
def test_a_narrow_model_is_the_wide_one_with_the_other_channels_zeroed(kind):
    # Without biases, which would make the zeroed channels something else again, and without norms:
    # LayerNorm counts the zeros, and BatchNorm turns them into something else. Attention scores
    # are those of the sub-model's channels, because the others are zeroed before they are scored.
    torch.manual_seed(0)
    wide = build(kind).double().eval()
    slicing: Slicing = wide.slicing()
    for key, tensor in wide.state_dict().items():
        if key.endswith("bias"):
            tensor.zero_()
    x, adjacency = torch.randn(40, IN, dtype=torch.float64), random_adjacency()
    whole = wide(x, adjacency=adjacency)
    for num in (2, 4):
        for channels in draw(slicing, num):
            narrow, zeroed = build(kind, num=num).double().eval(), deepcopy(wide)
            load_slices(narrow, wide, slicing, channels)
            zero_others(zeroed, slicing, channels)
            y = narrow(x, adjacency=adjacency)
            expected = zeroed(x, adjacency=adjacency)
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
            assert not torch.allclose(y, whole)
