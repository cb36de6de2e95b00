"""--impl fused and plain: the same model, the same weights, the same numbers up to rounding."""

import pytest
import torch
import torch.nn.functional as F

from vigpipe import ops
from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.model.variants import create_model


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert all(version.startswith("C++") for version in ops.versions("cpu").values())


def make(name, **options):
    """The two of them in float64; weights as they start, but for norms and biases: not 1 and 0."""
    models = []
    for impl in ("plain", "fused"):
        torch.manual_seed(0)
        model = create_model(name, num_classes=5, impl=impl, **options).double()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        models.append(model)
    return models


def step(model, images, labels):
    """Loss, gradients, and what BatchNorm's statistics became."""
    model.train()
    keys = sample_keys(0, 0, torch.arange(len(images)))
    logits = model(images, keys)
    loss = F.cross_entropy(logits, labels)
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    return logits.detach(), gradients, dict(model.named_buffers())


def largest(ours, theirs):
    """Largest difference of any tensor, against the largest number in that kind of tensor."""
    return max(
        float((ours[k] - theirs[k]).abs().max()) / max(1e-30, float(theirs[k].abs().max()))
        for k in theirs
    )


def check(plain, fused, images, labels, tolerance):
    logits, gradients, statistics = step(plain, images, labels)
    ours, our_gradients, our_statistics = step(fused, images, labels)
    assert list(plain.state_dict()) == list(fused.state_dict())
    assert (ours - logits).abs().max() <= tolerance * logits.abs().max()
    # A bias before a norm has gradient 0 in truth, and rounding in its place.
    scale = max(float(g.abs().max()) for g in gradients.values())
    real = {k: g for k, g in gradients.items() if g.dim() > 1 or g.abs().max() > 1e-5 * scale}
    assert largest({k: our_gradients[k] for k in real}, real) <= tolerance
    for name, theirs in statistics.items():
        torch.testing.assert_close(our_statistics[name], theirs, rtol=tolerance, atol=tolerance)
    plain.eval()
    fused.eval()
    with torch.no_grad():
        theirs, ours = plain(images), fused(images)
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        (3, {"drop_path_rate": 0.5, "drop_rate": 0.2}),
        (4, {}),
        # Nothing can be folded.
        (1, {"norm": "layer"}),
        (2, {"norm": "group"}),
        (3, {"graph": "knn"}),
    ],
)
def test_study(channels, options):
    plain, fused = make("vig_study", in_chans=channels, img_size=(6, 7), **options)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(5, channels, 6, 7, generator=generator, dtype=torch.float64)
    check(plain, fused, images, torch.tensor([0, 1, 2, 3, 4]), 1e-9)


@pytest.mark.filterwarnings("ignore:images of .* give too few nodes")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vig_digits", {"aggregator": "maxmean,gin", "graph": "knn,window", "drop_path_rate": 0.3}),
        ("pvig_cifar_ti", {"norm": "layer"}),
        ("vig_digits", {"norm": "group", "aggregator": "sage,edge"}),
    ],
)
def test_vig(name, options):
    plain, fused = make(name, img_size=12, **options)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 12, 12, generator=generator, dtype=torch.float64)
    check(plain, fused, images, torch.tensor([0, 1, 2]), 1e-8)


def test_recomputed_blocks_count_their_statistics_once():
    plain, fused = make("vig_study", img_size=(4, 4))
    fused.recompute = True
    images = torch.rand(3, 3, 4, 4, dtype=torch.float64)
    _, expected, _ = step(plain, images, torch.tensor([0, 1, 2]))
    _, found, buffers = step(fused, images, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(found["fc2.weight"], expected["fc2.weight"], rtol=1e-9, atol=1e-9)
    assert {int(v) for k, v in buffers.items() if k.endswith("tracked")} == {1}
