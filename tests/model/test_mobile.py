"""The models without kNN against the slow versions of tests/mobile_reference.py."""

from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.utils.model import reparameterize_model

from tests.mobile_reference import PublishedModel
from tests.reference import assert_same_outcome, randomize
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.inference.load import load
from vigpipe.model.fit import convert, load_weights, match_state
from vigpipe.model.identify import identify
from vigpipe.model.keyed_dropout import DropPath
from vigpipe.model.mobile import MobileGnn, MobileShape
from vigpipe.model.published import to_own_names
from vigpipe.model.shapes import MOBILE_SHAPES
from vigpipe.model.variants import create_model

# Blocks, channels and the hidden layer: from the published code, as is what comes below.
PUBLISHED: dict[str, Any] = {
    "mobilevig_ti": ((2, 2, 6, 2), (42, 84, 168, 256), 512),
    "mobilevig_s": ((3, 3, 9, 3), (42, 84, 176, 256), 512),
    "mobilevig_m": ((3, 3, 9, 3), (42, 84, 224, 400), 768),
    "mobilevig_b": ((5, 5, 15, 5), (42, 84, 240, 464), 768),
    "mobilevigv2_ti": (((2, 0), (2, 2), (6, 2), (2, 2)), (32, 64, 128, 256), 512),
    "mobilevigv2_s": (((3, 0), (3, 3), (9, 3), (3, 3)), (32, 64, 128, 256), 512),
    "mobilevigv2_m": (((3, 0), (3, 3), (9, 3), (3, 3)), (32, 64, 192, 384), 512),
    "mobilevigv2_b": (((3, 0), (3, 3), (9, 3), (3, 3)), (64, 128, 256, 512), 768),
    "greedyvig_s": (((2, 2), (2, 2), (6, 2), (2, 2)), (48, 96, 192, 384), 768),
    "greedyvig_m": (((3, 3), (3, 3), (9, 3), (3, 3)), (56, 112, 224, 448), 768),
    "greedyvig_b": (((4, 4), (4, 4), (12, 4), (3, 3)), (64, 128, 256, 512), 768),
    "adaptvig_s": (((3, 3), (3, 3), (9, 3), (3, 3)), (32, 64, 128, 256), 768),
    "adaptvig_m": (((4, 4), (4, 4), (12, 4), (4, 4)), (48, 96, 192, 320), 768),
    "adaptvig_b": (((5, 5), (5, 5), (15, 5), (5, 5)), (48, 96, 192, 384), 768),
    "logvig_ti": (((3, 3), (3, 3), (9, 3), (3, 3)), (32, 64, 128, 224), 768),
    "logvig_s": (((5, 5), (5, 5), (15, 5), (5, 5)), (32, 64, 128, 256), 768),
    "logvig_b": (((5, 5), (5, 5), (18, 6), (5, 5)), (48, 96, 192, 384), 768),
}
K = {
    "mobilevig": (2, 2, 2, 2),
    "mobilevigv2": (0, 8, 4, 2),
    "greedyvig": (8, 4, 2, 1),
    "adaptvig": (8, 4, 2, 1),
    "logvig": (2, 2, 2, 2),
}
# Parameters, numbers in buffers, and tensors of the published models.
COUNTS = {
    "mobilevig_ti": (5_271_074, 34_108, 336),
    "mobilevig_s": (7_276_538, 51_388, 481),
    "mobilevig_m": (14_075_786, 67_836, 481),
    "mobilevig_b": (26_868_506, 121_244, 771),
    "mobilevigv2_ti": (5_695_824, 42_920, 544),
    "mobilevigv2_s": (7_767_632, 63_369, 793),
    "mobilevigv2_m": (15_471_504, 90_249, 793),
    "mobilevigv2_b": (27_878_864, 126_121, 793),
    "greedyvig_s": (11_983_376, 65_890, 622),
    "greedyvig_m": (21_928_112, 113_264, 910),
    "greedyvig_b": (30_905_296, 153_686, 1_137),
    "adaptvig_s": (8_685_785, 65_432, 940),
    "adaptvig_m": (18_062_812, 119_918, 1_238),
    "adaptvig_b": (26_987_231, 160_180, 1_536),
    "logvig_ti": (8_121_456, 65_435, 931),
    "logvig_s": (13_970_192, 112_871, 1_507),
    "logvig_b": (30_528_752, 182_277, 1_612),
}
# What the default has more than the published code: the convolution that that makes anew.
LEARNED = {"logvig_ti": 14_560, "logvig_s": 16_640, "logvig_b": 37_248}

# Two resolutions whose sides are odd, smaller than a shift, or both.
SIZES = [((20, 28), (3, 3), True), ((12, 36), (2, 8), False), ((8, 8), (1, 1), True)]


def published(name: str, num_classes: int = 1000) -> PublishedModel:
    """The slow version of a published variant."""
    family, _ = name.split("_")
    blocks, channels, hidden = PUBLISHED[name]
    if family == "mobilevig":
        *local, last = blocks
        blocks = [*((n, 0) for n in local), (0, last)]
    return PublishedModel(family, blocks, channels, hidden, K[family], num_classes=num_classes)


def options_of(name: str) -> dict[str, Any]:
    return {"compat": "reference"} if name.startswith("logvig") else {}


def small(family: Any, k: tuple[int, int], **options: Any) -> tuple[MobileGnn, PublishedModel]:
    """A model of two resolutions, and its slow version."""
    blocks = ((2, 0), (0, 2)) if family == "mobilevig" else ((1, 1), (1, 2))
    shape = MobileShape(family, blocks, (8, 12), 16, k)
    ours = MobileGnn(shape, 5, **options_of(family), **options)
    theirs = PublishedModel(family, blocks, (8, 12), 16, k, num_classes=5)
    if ours.merge is not None:
        numbers: Any = ours.merge.adjust.numbers
        theirs.merge.adjust = (numbers[:, :-1, None, None], numbers[:, -1])
    return ours, theirs


@pytest.mark.parametrize("family", K)
@pytest.mark.parametrize(("size", "k", "train"), SIZES)
def test_a_small_model_equals_the_slow_one(family, size, k, train):
    ours, theirs = small(family, k)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, *size, generator=generator, dtype=torch.float64)
    assert_same_outcome(ours, theirs, images, torch.float64, train, rename=to_own_names)


@pytest.mark.parametrize("family", K)
def test_single_precision_and_plain_operators(family):
    ours, theirs = small(family, (3, 2), img_size=32)
    ours.set_impl("plain")
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert_same_outcome(ours, theirs, images, torch.float32, False, rename=to_own_names)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_has_the_names_shapes_and_counts_of_its_variant(name):
    assert PUBLISHED.keys() == COUNTS.keys() == {n for n in MOBILE_SHAPES if "cifar" not in n}
    shape, k = MOBILE_SHAPES[name], K[name.split("_")[0]] if name != "logvig_ti" else (3, 3, 2, 2)
    uses_k = [bool(graph) for _, graph in shape.blocks]
    assert [n for n, used in zip(shape.k, uses_k, strict=True) if used] == [
        n for n, used in zip(k, uses_k, strict=True) if used
    ]
    with torch.device("meta"):
        theirs = published(name)
        ours = create_model(name, num_classes=1000, **options_of(name))
    state = to_own_names(theirs.state_dict())
    expected = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    assert {key: tensor.shape for key, tensor in state.items()} == expected
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    buffers = sum(buffer.numel() for buffer in ours.buffers())
    assert (parameters, buffers, len(state)) == COUNTS[name]
    found = identify(state)
    assert (found.name, found.num_classes, found.num_heads) == (name, 1000, 2)
    with torch.device("meta"):
        learned = create_model(name, num_classes=1000)
    more = sum(parameter.numel() for parameter in learned.parameters()) - parameters
    assert more == LEARNED.get(name, 0)


@pytest.mark.parametrize("name", ["mobilevigv2_ti", "greedyvig_s"])
def test_a_file_of_another_variant_is_refused_by_its_name(name, tmp_path):
    torch.save(published(name, 10).state_dict(), tmp_path / "w.pth")
    load_weights(create_model(name, num_classes=10), tmp_path / "w.pth")
    with pytest.raises(InputError, match=rf"does not fit the model \(it is of {name} for 10 cl"):
        create_model("greedyvig_m", num_classes=10, checkpoint_path=tmp_path / "w.pth")


def test_timm_loads_a_published_file_and_leaves_both_heads_out_for_other_classes(tmp_path):
    theirs = published("mobilevig_ti", 10)
    randomize(theirs)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "w.pth")
    overlay = {"file": str(tmp_path / "w.pth"), "num_classes": 10}
    every: list[dict[str, Any]] = [
        {"num_classes": 10},
        {"num_classes": 3},
        {"num_classes": 10, "in_chans": 1},
    ]
    options: dict[str, Any] = {"pretrained": True, "pretrained_cfg_overlay": overlay}
    models: list[Any] = [timm.create_model("mobilevig_ti", **options, **m).eval() for m in every]
    whole, other, grey = models
    images = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(whole(images), theirs.eval()(images), rtol=1e-3, atol=1e-3)
        assert torch.equal(whole.forward_features(images), other.forward_features(images))
        assert other(images).shape == (1, 3)
        assert grey(images[:, :1]).shape == (1, 10)
        headless: Any = timm.create_model("mobilevig_ti", num_classes=0, **options).eval()
        assert torch.equal(headless.forward_features(images), whole.forward_features(images))
        assert headless(images).shape == (1, 512)


def test_the_second_head_is_dropped_by_conversion(tmp_path):
    theirs = published("mobilevigv2_ti", 10)
    source, target = tmp_path / "w.pth", tmp_path / "w.safetensors"
    torch.save(theirs.state_dict(), source)
    with pytest.raises(InputError, match="leave the second head out with vigpipe weights convert"):
        create_model("mobilevigv2_ti", num_classes=10, dist_head=False, checkpoint_path=source)
    assert convert(source, target, dist_head=False) == "mobilevigv2_ti"
    model = load(target).model
    images = torch.rand(1, 3, 32, 32)
    hidden = theirs.eval().prediction(theirs.features(images))
    torch.testing.assert_close(model(images), theirs.head(hidden)[..., 0, 0], rtol=1e-4, atol=1e-4)
    new = create_model("mobilevigv2_ti", num_classes=3, dist_head=False)
    state = to_own_names(theirs.state_dict())
    fitting = match_state(state, new, "w.pth", new_classifier=True)
    assert fitting.keys() == new.state_dict().keys()
    with pytest.raises(InputError, match="the file has no second head"):
        create_model("mobilevigv2_ti", num_classes=10, checkpoint_path=target)
    with pytest.raises(InputError, match=r"^--no-dist-head: .* for 10 classes and has one head"):
        convert(target, tmp_path / "again.safetensors", dist_head=False)


def test_conversion_keeps_what_a_run_has_said(tmp_path):
    state = create_model("greedyvig_cifar_ti", num_classes=2).state_dict()
    said = {"img_size": "48x40", "mean": "0.25", "crop_pct": "0.8", "class_names": '["a", "b"]'}
    save_file(state, tmp_path / "run.safetensors", {"model": "greedyvig_cifar_ti", **said})
    convert(tmp_path / "run.safetensors", tmp_path / "one.safetensors", dist_head=False)
    found = read_metadata(tmp_path / "one.safetensors")
    assert found.items() >= {**said, "dist_head": "False", "num_classes": "2"}.items()


def test_damaged_published_files_are_refused_in_a_sentence():
    state = published("adaptvig_s", 10).state_dict()
    block = "backbone.3.4.mixer.graph_conv.q_conv.weight"
    for name, tensor in (
        (block, torch.ones(4)),
        (block, torch.ones(64, 256, 3, 3)),
        (f"backbone.0.{'9' * 5000}.layer_scale_1", torch.ones(4)),
        ("backbone.0.01.layer_scale_2", torch.ones(4)),
    ):
        with pytest.raises(InputError, match="of no variant; closest is adaptvig_s for 10 classes"):
            identify(to_own_names({**state, name: tensor}))


@pytest.mark.parametrize("name", ["fc1.0.weight", "layer_scale_1", "layer_scale_gamma"])
def test_a_tensor_too_many_never_takes_the_place_of_another(name):
    """Symptom: what is called as a tensor is here, or like layer scale, replaced the right one."""
    theirs = published("greedyvig_s", 10).state_dict()
    for block in ("backbone.0.0.", "backbone.0.2."):  # a local block, and one with a graph
        more = {block + name: torch.ones(48)} if block + name not in theirs else {}
        for state in (theirs | more, more | theirs):
            assert len(to_own_names(state)) == len(state)
            if more:
                with pytest.raises(InputError, match=r"does not fit the model.*1 unexpected"):
                    match_state(to_own_names(state), small_greedy(), "w.pth")


def small_greedy() -> MobileGnn:
    with torch.device("meta"):
        model = create_model("greedyvig_s", num_classes=10)
    assert isinstance(model, MobileGnn)
    return model


def test_anomalies_are_found_in_local_blocks_too():
    model = create_model("mobilevigv2_cifar_ti", num_classes=3)
    model.set_detect_anomaly(True)
    images = torch.rand(2, 3, 32, 32)
    images[0, 0, 5, 5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"^block 0: "):
        model(images)


@pytest.mark.parametrize("family", K)
def test_drop_path_rates_are_the_published_ones(family):
    """They rise over all blocks, or in MobileViGv2 over graph blocks only."""
    model, _ = small(family, (2, 2), drop_path_rate=0.4)
    rates = [m.rate for m in model.modules() if isinstance(m, DropPath)]
    graph = [0.4 * i / (3 if family == "mobilevig" else 4) for i in range(5)]
    expected = {
        "mobilevig": [graph[0], graph[1], graph[2], graph[2], graph[3], graph[3]],
        "mobilevigv2": [graph[i] for i in (0, 0, 0, 1, 1, 1, 2, 2)],
    }.get(family, [graph[i] for i in (0, 1, 1, 2, 3, 3, 4, 4)])
    assert rates == pytest.approx(expected)
    streams = [m.stream for m in model.modules() if isinstance(m, DropPath)]
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
def test_folding_changes_nothing(norm):
    for family in K:
        model, _ = small(family, (2, 2), img_size=32, norm=norm)
        model = model.double()
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.rand_like(parameter))
        images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
        model(images)  # statistics of their own
        expected = model.eval()(images)
        folded = reparameterize_model(model)
        if norm == "batch":
            assert len(folded.state_dict()) < len(model.state_dict()) / 2
        torch.testing.assert_close(folded(images), expected, rtol=1e-10, atol=1e-10)


def test_evaluation_averages_the_heads_and_training_returns_both():
    model, _ = small("mobilevigv2", (2, 2), img_size=16)
    images = torch.rand(2, 3, 16, 16)
    first, second = model(images)
    assert first.shape == second.shape == (2, 5)
    hidden = model.eval().forward_head(model.forward_features(images), pre_logits=True)
    first, second = (head(hidden) for head in model.get_classifier())  # pyrefly: ignore
    torch.testing.assert_close(model(images), (first + second) / 2)
    model.freeze(["readout"])  # which then evaluates
    pair = model.train()(images)
    assert isinstance(pair, tuple)
    assert len(pair) == 2
    one, _ = small("mobilevigv2", (2, 2), dist_head=False)
    assert one(images).shape == (2, 5)
    assert "prediction.5.weight" not in one.state_dict()


def test_options_of_other_models_are_refused():
    def refused(match: str, name: str = "greedyvig_cifar_ti", **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            create_model(name, num_classes=3, **options)

    refused("^--graph pattern: greedyvig_cifar_ti has no such choice", graph="pattern")
    refused("^--aggregator gin: ", aggregator="gin")
    refused("^--compat reference: ", compat="reference")
    refused("^--stem-stride 4: ", stem_stride=4)
    refused("^narrow 2: ", narrow=2)
    refused("^--no-dist-head: vig_digits has one head", "vig_digits", dist_head=False)
    with pytest.raises(InputError, match=r"^--strategy subnetworks: the channels of adaptvig"):
        small("adaptvig", (2, 2))[0].slicing()


def test_the_small_versions_are_as_the_families_for_images_of_cifar():
    for name in ("mobilevigv2_cifar_ti", "greedyvig_cifar_ti"):
        shape = MOBILE_SHAPES[name]
        assert len(shape.blocks) == 3
        model = create_model(name, num_classes=10).eval()
        assert [level["reduction"] for level in model.feature_info] == [2, 4, 8]  # pyrefly: ignore
        assert model(torch.rand(1, 3, 32, 32)).shape == (1, 10)
