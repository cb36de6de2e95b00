"""Tables of image models: every tensor is there, shapes are those of narrow models, and so is y."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.refusals import check_refusals
from vigpipe.config.choices import AGGREGATORS, NORMS
from vigpipe.model.blocks import VigShape
from vigpipe.model.layer import Layer
from vigpipe.model.norm import BatchNorm
from vigpipe.model.readout import Readout
from vigpipe.model.slicing import Side, Slicing
from vigpipe.model.stem import ConvStem, Downsample
from vigpipe.model.study import VigStudy
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.split import cut_stages

pytestmark = pytest.mark.filterwarnings("ignore::vigpipe.model.blocks.FewNodesWarning")

# Two stages, with 8x8 and 4x4 nodes; each of the five blocks has another aggregator.
PYRAMID = VigShape(
    (2, 3), (16, 32), k=(3, 5), max_dilation=1, reductions=(2, 1), relative=True,
    stem=(2, 1, 1), stem_stride=1, img_size=(8, 8),
)  # fmt: skip
ALL = ",".join(AGGREGATORS)
ways = pytest.mark.parametrize("divided", ["inner", "tied"])


def pyramid(graph: str = "grid", aggregator: str = ALL, **options: Any) -> VisionGnn:
    return VisionGnn(PYRAMID, 5, graph=graph, aggregator=aggregator, **options)


def study(divided: str = "inner", **options: Any) -> VigStudy:
    assert divided == "inner"
    return VigStudy(5, img_size=(4, 4), **options)


def without_norms(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "Norm" in type(child).__name__:
                setattr(module, name, nn.Identity())
    return model


def with_random_weights(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        fan_in = max(1, parameter[0].numel() if parameter.dim() > 1 else 1)
        nn.init.normal_(parameter, std=fan_in**-0.5)
    return model


def draw(slicing: Slicing, num: int) -> list[dict[str, Tensor]]:
    """Every sub-model's channels of every group."""
    generator = torch.Generator().manual_seed(0)
    groups = {
        group: torch.randperm(size, generator=generator).view(num, -1).sort(1).values
        for group, size in slicing.sizes.items()
    }
    return [{group: rows[j] for group, rows in groups.items()} for j in range(num)]


def entries(slicing: Slicing, side: Side, channels: dict[str, Tensor]) -> Tensor:
    return side.entries(channels[side.group], slicing.sizes[side.group])


def load_slices(narrow: nn.Module, wide: nn.Module, slicing: Slicing, channels: Any) -> None:
    state = {}
    for name, tensor in wide.state_dict().items():
        for dim, side in enumerate(slicing.sides[name]):
            if side is not None:
                tensor = tensor.index_select(dim, entries(slicing, side, channels))
        state[name] = tensor
    narrow.load_state_dict(state)


@torch.no_grad()
def zero_others(model: nn.Module, slicing: Slicing, channels: Any) -> None:
    """Zero the rows that make channels of other sub-models; leave alone what reads these."""
    for name, tensor in model.state_dict().items():
        dim = 1 if name.endswith(("pos_embed", "weight1")) else 0  # weight1 is (in, out)
        side = slicing.sides[name][dim] if tensor.dim() > 0 else None
        if side is not None:
            kept = torch.zeros(tensor.shape[dim], dtype=tensor.dtype)
            kept[entries(slicing, side, channels)] = 1.0
            tensor.mul_(kept.view(-1, *[1] * (tensor.dim() - 1 - dim)))


# ---- tables and narrow models -------------------------------------------------------------------


def assert_table_is_that_of_narrow_models(make: Any, divided: Any, nums=(1, 2, 4)) -> None:
    with torch.device("meta"):
        wide = make()
        slicing, tensors = wide.slicing(divided=divided), wide.state_dict()
        assert slicing.sides.keys() == tensors.keys()
        for num in nums:
            narrow = make(narrow=num, divided=divided).state_dict()
            shapes = {name: slicing.shape(name, t.shape, num) for name, t in tensors.items()}
            assert shapes == {name: tuple(t.shape) for name, t in narrow.items()}


@pytest.mark.parametrize(
    ("name", "divided"), [("vig_study", "inner"), ("vig_ti_224", "tied"), ("pvig_ti_224", "inner")]
)
def test_shapes_are_those_of_narrow_models(name, divided):
    assert_table_is_that_of_narrow_models(partial(create_model, name, num_classes=10), divided)


@ways
@pytest.mark.parametrize("norm", NORMS)
def test_shapes_are_those_of_narrow_models_with(norm, divided):
    assert_table_is_that_of_narrow_models(partial(pyramid, "knn", norm=norm), divided)


@ways
def test_stages_of_a_narrow_model_fit_together(divided):
    def make():
        torch.manual_seed(0)
        return pyramid("knn,reuse", narrow=2, divided=divided)

    images, keys = torch.rand(2, 3, 8, 8), torch.arange(2)
    x = images
    for stage in cut_stages(make, even_plan(6, 3), (0, 1, 2)):
        x = getattr(stage, "model", stage)(x, keys)  # pyrefly: ignore[not-callable]
    assert torch.equal(x, make()(images, keys))


def test_relative_positions_are_those_of_the_wide_model():
    wide, narrow = pyramid("knn"), pyramid("knn", narrow=4, divided="tied")
    for size in (8, 12):
        for model in (wide, narrow):
            model.set_input_size(size)
        tables = [dict(model.named_buffers()) for model in (wide, narrow)]
        names = [name for name in tables[0] if name.endswith("relative_pos")]
        assert len(names) == 5
        for name in names:
            assert torch.equal(tables[0][name], tables[1][name])


def test_a_width_that_is_not_divided_is_refused():
    pyramid(narrow=8, aggregator="edge")
    stem = "the 8 channels of a convolution of the stem; choose"
    first = (
        "--dp 8: 8 sub-networks cannot equally share the 4 channels of each of the 4 parts "
        "that the graph convolution of block 0 takes; choose a divisor of 4"
    )
    tied_study = partial(create_model, "vig_study", num_classes=10, divided="tied")
    check_refusals(
        [
            (partial(pyramid, narrow=8), first),
            (partial(pyramid, narrow=3, divided="tied"), stem),
            (partial(pyramid, narrow=16, divided="tied"), stem),
            (partial(study, narrow=3), r"--dp 3: .* share the 256 channels of every Grapher"),
            (tied_study, "--divided tied: vig_study has no such choice"),
        ]
    )
    with pytest.raises(ValueError, match="stays whole"):
        study().slicing(divided="tied")


# ---- what a narrow model computes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "impl", "divided"),
    [
        (partial(pyramid, "grid"), "fused", "inner"),
        (partial(pyramid, "pattern"), "plain", "inner"),
        (partial(pyramid, "pattern"), "fused", "tied"),
        (partial(pyramid, "grid"), "plain", "tied"),
        (study, "fused", "inner"),
    ],
)
@torch.no_grad()
def test_a_narrow_model_is_the_wide_one_with_the_other_channels_zeroed(make, impl, divided):
    # Without norms: LayerNorm and GroupNorm count the zeros, and BatchNorm turns them into
    # something else. Graphs are fixed: by the wide model's features, kNN would choose others.
    # Biases are there: those of other channels are zeroed with them, and GELU leaves 0 as it is.
    def build(**options: Any) -> Any:
        model = make(**options)
        model.set_impl(impl)
        return with_random_weights(without_norms(model.double().eval()))

    images = torch.rand(2, 3, *make().img_size, dtype=torch.float64)
    wide = build()
    slicing, whole = wide.slicing(divided=divided), wide(images)
    for num in (2, 4):
        for channels in draw(slicing, num)[-2:]:
            narrow, zeroed = build(narrow=num, divided=divided), build()
            load_slices(narrow, wide, slicing, channels)
            zero_others(zeroed, slicing, channels)
            y = narrow(images)
            torch.testing.assert_close(y, zeroed(images), rtol=1e-10, atol=1e-10)
            assert not torch.allclose(y, whole)


# ---- branch_rescale -----------------------------------------------------------------------------


def ffn_of(model: Any) -> Any:
    return model.blocks["0"].ffn if isinstance(model, VigStudy) else model.backbone["0"][1]


def sub_ffns(make: Any, wide: Any, num: int, **options: Any) -> list[Any]:
    slicing, narrow = wide.slicing(), []
    for channels in draw(slicing, num):
        narrow.append(make(narrow=num, **options).double())
        load_slices(narrow[-1], wide, slicing, channels)
    return [ffn_of(model) for model in narrow]


@pytest.mark.parametrize(
    ("make", "impl", "train"),
    [
        (pyramid, "fused", True),
        (pyramid, "plain", False),
        (study, "fused", False),
        (study, "plain", True),
    ],
)
@torch.no_grad()
def test_the_mean_of_rescaled_branches_is_the_merged_models(make, impl, train):
    # Of the FFN, whose hidden channels do not depend on one another, and without the last norm.
    # That of the hidden layer acts on every channel alone.
    wide = with_random_weights(make().double())
    x = torch.randn(2, 4, 4, 16 if make is pyramid else 3, dtype=torch.float64)
    x = x if make is pyramid else x.flatten(1, 2)

    def branches(ffns: list[Any]) -> Tensor:
        for ffn in ffns:
            ffn.train(train)
            for module in ffn.modules():
                if hasattr(type(module), "fused"):
                    module.fused = impl == "fused"
            ffn.fc2[1] = nn.Identity()
        return torch.stack([ffn(x, None) - x for ffn in ffns])

    for num in (2, 4):
        rescaled = branches(sub_ffns(make, wide, num, branch_rescale=True))
        faithful = branches(sub_ffns(make, wide, num))
        (expected,) = branches([ffn_of(deepcopy(wide))])
        torch.testing.assert_close(rescaled.mean(0), expected, rtol=1e-10, atol=1e-10)
        bias = ffn_of(wide).fc2[0].bias
        torch.testing.assert_close(
            (faithful - bias).sum(0) + bias, expected, rtol=1e-10, atol=1e-10
        )


@torch.no_grad()
def test_a_fused_layer_keeps_its_factor():
    torch.manual_seed(0)
    model = pyramid(narrow=2, branch_rescale=True).double()
    images = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    model(images, torch.arange(4))  # running statistics
    expected = model.eval()(images)
    for module in list(model.modules()):
        if isinstance(module, Layer | ConvStem | Downsample | Readout):
            module.fuse()
    assert not any(isinstance(module, BatchNorm) for module in model.modules())
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)
