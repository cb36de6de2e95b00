"""Prepacked models: the same logits, from fewer passes over memory, and nothing else."""

import copy
from typing import Any

import pytest
import torch

import vigpipe
from vigpipe.config.choices import Norm
from vigpipe.inference.prepack import Product, can_prepack, has_kernels, prepack
from vigpipe.model.blocks import VigShape
from vigpipe.model.layer import Layer
from vigpipe.model.mobile import FAMILIES, MobileGnn, MobileShape
from vigpipe.model.norm import BatchNorm
from vigpipe.model.pointwise import Pointwise
from vigpipe.model.study import VigStudy
from vigpipe.model.vig import VisionGnn

PYRAMID = VigShape(
    (1, 2), (16, 32), k=(2, 4), reductions=(2, 1), relative=True, stem=(2, 1), img_size=(16, 16)
)
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor lacks bfloat16"
)


def trained_like(norm: Norm = "batch", aggregator="max", graph="knn"):
    """A pyramid whose norms have statistics, as after a training."""
    torch.manual_seed(0)
    model = VisionGnn(
        PYRAMID, num_classes=5, norm=norm, aggregator=aggregator, graph=graph, stem_stride=2
    )
    return with_statistics(model)


def mobile_like(family, norm: Norm = "batch"):
    """A model without kNN, of two resolutions, as after a training."""
    torch.manual_seed(0)
    shape = MobileShape(
        family, ((1, 1), (0, 2)), (16, 32), 24, (2, 1), stem_strides=(1, 2), img_size=(16, 16)
    )
    model = MobileGnn(shape, num_classes=5, norm=norm)
    for name, parameter in model.named_parameters():
        if name.endswith("scale"):
            torch.nn.init.uniform_(parameter, 0.5, 1)
    return with_statistics(model)


def with_statistics(model):
    for module in model.modules():
        if isinstance(module, BatchNorm):
            torch.nn.init.normal_(module.running_mean, std=0.3)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 2)
            torch.nn.init.normal_(module.bias, std=0.3)
    return model.eval()


def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def difference(model, expected, x=None):
    with torch.no_grad():
        found = model(images() if x is None else x).double()
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
@pytest.mark.parametrize("aggregator", ["max,edge,sage", "gin,maxmean,max"])  # of three blocks
def test_logits_are_the_same_up_to_rounding(norm, aggregator):
    model = trained_like(norm, aggregator)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images().double())
    eager = difference(model, exact)
    assert difference(prepack(model), exact) < max(4 * eager, 1e-5)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_knn_are_the_same_up_to_rounding(family, norm):
    model = mobile_like(family, norm)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images().double())
    eager = difference(model, exact)
    assert difference(prepack(model), exact) < max(4 * eager, 1e-5)
    if norm == "batch":
        kinds = Layer | BatchNorm | torch.nn.Conv2d | torch.nn.Linear | Pointwise
        assert not [m for m in model.modules() if isinstance(m, kinds)]
    assert len(model.prediction.heads) == 1


@needs_bfloat16
@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_knn_in_bfloat16_are_as_exact_as_under_autocast(family):
    model = mobile_like(family)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images().double())
        with torch.autocast("cpu", torch.bfloat16):
            lowered = difference(model, exact)
    # A node may be nearer than the limit before rounding alone.
    assert 1e-4 < difference(prepack(model, torch.bfloat16), exact) < max(2 * lowered, 0.05)


@needs_bfloat16
def test_products_in_bfloat16_are_as_exact_as_under_autocast():
    model = trained_like(graph="grid")  # neighbours would change with a rounding
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images().double())
        with torch.autocast("cpu", torch.bfloat16):
            lowered = difference(model, exact)
    packed = difference(prepack(model, torch.bfloat16), exact)
    assert 1e-4 < packed < 1.5 * lowered


def test_every_product_is_prepacked():
    model = prepack(trained_like())
    assert not [m for m in model.modules() if isinstance(m, Layer | BatchNorm | torch.nn.Conv2d)]
    assert [name for name, _ in model.named_parameters()] == ["pos_embed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_computes_a_product_its_bias_and_what_follows(dtype):
    if not has_kernels(dtype):
        pytest.skip("this processor lacks bfloat16")
    pointwise = Pointwise(8, 16)
    product = Product(pointwise.matrix, pointwise.bias, dtype, gelu=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        product(torch.ones(4, 8))
    names = {event.key for event in profile.key_averages()}
    assert "mkldnn::_linear_pointwise" in names
    # In float32 GELU is a pass of C++, which the profiler does not see.
    assert not {"aten::add", "aten::add_", "aten::gelu", "aten::gelu_"} & names
    assert product.has_own_pass == (dtype == torch.float32)


@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.float32, torch.nan), (torch.bfloat16, torch.inf)]
)
def test_what_is_not_finite_shows_in_the_logits(dtype, bad):
    if not can_prepack(trained_like(), dtype):
        pytest.skip("this processor lacks bfloat16")
    for name in ("stem.convs.0.bias", "backbone.0.0.fc1.0.bias", "backbone.1.conv.0.bias"):
        model = trained_like()
        with torch.no_grad():
            model.get_parameter(name)[1] = bad
            assert not prepack(model, dtype)(images()).isfinite().any()


def test_a_stage_is_prepacked_too():
    stage = trained_like()
    stage.keep([2, 3], stem=False, readout=True)
    x = torch.randn(3, 4, 4, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = copy.deepcopy(stage).double()(x.double())
    assert difference(prepack(stage), expected, x) < 1e-5


def test_what_cannot_be_prepacked_is_refused():
    for model in (trained_like().double(), VigStudy(img_size=(8, 8))):
        assert not can_prepack(model, torch.float32)
        with pytest.raises(vigpipe.InputError, match=r"takes a model of images .* on a CPU"):
            prepack(model)
    with pytest.raises(vigpipe.InputError, match=r"\(got VisionGnn, torch.float16\)"):
        prepack(trained_like(), torch.float16)


def test_a_prepacked_model_computes_and_refuses_everything_else():
    model = prepack(trained_like())
    with pytest.raises(vigpipe.InputError, match=r"takes a model of images .* once"):
        prepack(model)
    uses: dict[str, Any] = {"trained": model.train, "moved or converted": model.double}
    uses["saved"] = model.state_dict
    uses["copied"] = lambda: copy.deepcopy(model)
    uses["exported"] = lambda: torch.export.export(model, (torch.zeros(2, 3, 32, 32),))
    for what, use in uses.items():
        with pytest.raises(vigpipe.InputError, match=f"cannot be {what}; load the weights once"):
            use()
    assert model.eval() is model
