"""NaN and infinite features: never a silent wrong graph."""

import pytest
import torch

from vigpipe.model.variants import create_model


def digits(**options):
    torch.manual_seed(0)
    return create_model("vig_digits", num_classes=10, in_chans=1, **options)


@pytest.mark.parametrize(
    ("graph", "bad"),
    [("window", torch.inf), ("lookahead", torch.nan), ("grid,knn,reuse", torch.inf)],
)
def test_the_block_and_the_count_are_named(graph, bad):
    model = digits(graph=graph).eval()
    model.set_detect_anomaly(True)
    images = torch.rand(3, 1, 8, 8)
    model(images)
    bias = model.get_parameter("backbone.1.1.fc2.1.bias")
    with torch.no_grad():
        bias[5] = bad  # all nodes of block 2
    expected = r"^block 2: 192 of 192 nodes, in 3 of 3 images, have NaN or infinite features"
    with pytest.raises(FloatingPointError, match=expected):
        model(images)
    model.set_detect_anomaly(False)
    assert not model(images).isfinite().any()  # and without looking, the logits tell


def test_one_bad_image_is_counted_alone():
    model = digits().eval()
    model.set_detect_anomaly(True)
    images = torch.rand(3, 1, 8, 8)
    images[1, 0, 0, 0] = torch.nan  # spreads over two 3x3 convolutions of the stem
    with pytest.raises(FloatingPointError, match=r"^block 0: 9 of 192 nodes, in 1 of 3 images"):
        model(images)


def test_the_study_looks_too():
    model = create_model("vig_study", num_classes=10, img_size=(6, 6), graph="knn").eval()
    model.set_detect_anomaly(True)
    images = torch.rand(2, 3, 6, 6)
    images[0, 1, 2, 3] = torch.inf
    with pytest.raises(FloatingPointError, match=r"^block 0: 1 of 72 nodes, in 1 of 2 images"):
        model(images)
