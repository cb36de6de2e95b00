"""Tables of graph models: every tensor is there, shapes are those of narrow models, and so is y."""

from typing import Any

import pytest
import torch

from tests.model.gnn.graphs import random_adjacency
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.slicing import Slicing
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.split import cut_stages

KINDS = [
    ("gcn", None, 1),
    ("sage", "mean", 1),
    ("sage", "max", 1),
    ("sage", "pool", 1),
    ("gat", "v1", 1),
    ("gat", "v1", 2),
    ("gat", "v2", 2),
    ("gin", None, 1),
    ("gcn2", None, 1),
]
every = pytest.mark.parametrize(("name", "aggregator", "heads"), KINDS)
IN, CLASSES, WIDTH = 12, 5, 32


def build(name: Any, aggregator, heads, norm: Any = "none", num=1, in_channels=IN, layers=3) -> Any:
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


@pytest.mark.parametrize("partition_input", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@every
def test_shapes_are_those_of_narrow_models(name, aggregator, heads, norm, layers, partition_input):
    with torch.device("meta"):
        wide = build(name, aggregator, heads, norm, layers=layers).state_dict()
        slicing = build(name, aggregator, heads, norm, layers=layers).slicing(partition_input)
    assert slicing.sides.keys() == wide.keys()
    for num in (1, 2, 4):
        inputs = IN // num if partition_input else IN
        narrow = build(name, aggregator, heads, norm, num, inputs, layers).state_dict()
        for key, tensor in wide.items():
            assert slicing.shape(key, tuple(tensor.shape), num) == narrow[key].shape, key


@every
def test_groups_are_those_that_are_drawn(name, aggregator, heads):
    sizes = build(name, aggregator, heads, "batch").slicing().sizes
    if name == "gcn2":
        assert sizes == {"channels": WIDTH}
        return
    hidden = {"gin": ["hidden.0", "hidden.1"], "pool": ["hidden.1", "hidden.2"]}
    inner = hidden.get(name, hidden.get(aggregator, []))
    between = dict.fromkeys(["channels.1", "channels.2"], WIDTH // heads)
    assert sizes == between | dict.fromkeys(inner, WIDTH)


@every
def test_stages_have_the_table_of_the_model(name, aggregator, heads):
    def make():
        return build(name, aggregator, heads, "batch", layers=4)

    whole, sides = make().slicing(), {}
    for stage in cut_stages(make, even_plan(4, 4), (0, 1, 2, 3)):
        part: Slicing = getattr(stage, "model", stage).slicing()
        assert part.sizes.items() <= whole.sizes.items()
        sides |= part.sides
    assert sides == whole.sides


def test_a_tensor_without_sides_and_sides_without_a_tensor_are_refused():
    model = build("gcn", None, 1)
    model.register_buffer("another", torch.zeros(3))
    with pytest.raises(ValueError, match="either no tensor or no sides: another"):
        model.slicing()
    tensors, sides = build("gcn", None, 1).state_dict(), build("gcn", None, 1).slicing().sides
    with pytest.raises(ValueError, match=r"no sides: convs\.0\.bias"):
        Slicing.of({key: tensors[key] for key in tensors if key != "convs.0.bias"}, sides)
    tensors["convs.0.bias"] = torch.zeros(3)
    with pytest.raises(ValueError, match="a side has"):
        Slicing.of(tensors, sides)


@every
def test_a_narrow_model_is_the_wide_one_with_the_other_channels_zeroed(name, aggregator, heads):
    # Only without biases, which would make the zeroed channels something else again, and without
    # norms: LayerNorm counts the zeros, and BatchNorm turns them into something else. Attention
    # scores are those of the sub-model's channels, because the others are zeroed before they are
    # scored, too.
    torch.manual_seed(0)
    wide = build(name, aggregator, heads).double().eval()
    slicing: Slicing = wide.slicing()
    for key, tensor in wide.state_dict().items():
        if key.endswith("bias"):
            tensor.zero_()
    with torch.no_grad():
        x, adjacency = torch.randn(40, IN, dtype=torch.float64), random_adjacency()
        for num in (1, 2, 4):
            drawn = {
                group: torch.randperm(size).view(num, -1).sort(1)[0]
                for group, size in slicing.sizes.items()
            }
            for j in range(num):
                narrow = build(name, aggregator, heads, num=num).double().eval()
                zeroed = build(name, aggregator, heads).double().eval()
                whole, of_narrow = zeroed.state_dict(), narrow.state_dict()
                for key, tensor in wide.state_dict().items():
                    # What makes channels: zero those of others. Of weight1, (in, out), columns do.
                    output = 1 if key.endswith("weight1") else 0
                    mask, slices = torch.ones_like(tensor), tensor
                    for dim, side in enumerate(slicing.sides[key]):
                        if side is None:
                            continue
                        entries = side.entries(drawn[side.group][j], slicing.sizes[side.group])
                        slices = slices.index_select(dim, entries)
                        if dim == output:
                            mask = torch.zeros_like(tensor).index_copy(
                                dim, entries, mask.index_select(dim, entries)
                            )
                    whole[key].copy_(tensor * mask)
                    of_narrow[key].copy_(slices)
                y = narrow(x, adjacency=adjacency)
                expected = zeroed(x, adjacency=adjacency)
                torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
                assert num == 1 or not torch.allclose(y, wide(x, adjacency=adjacency))
