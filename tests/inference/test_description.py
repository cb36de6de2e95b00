"""What is known of a model from its file of weights, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.refusals import check_refusals
from tests.test_cli import make_pictures
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.data import open_source
from vigpipe.errors import InputError
from vigpipe.inference.description import read_description
from vigpipe.model.variants import create_model


def digits(**options: Any):
    """The state dict of a small model."""
    torch.manual_seed(0)
    options = {"num_classes": 3, "in_chans": 1, **options}
    return create_model("vig_digits", **options).state_dict()


def save(path: Path, state=None, **facts) -> Path:
    save_weights(path, digits() if state is None else state, facts)
    return path


def facts_of(description):
    return (
        description.model,
        description.num_classes,
        description.in_chans,
        description.image_size,
        description.mean,
        description.std,
    )


FACTS = {"model": "vig_digits", "num_classes": "3", "in_chans": "1", "img_size": "8x8"}


def test_a_run_leaves_all_that_is_needed(tmp_path):
    out = tmp_path / "run"
    pictures = str(make_pictures(tmp_path / "pictures", size=(12, 10)))
    line = ["train", "--data", pictures, "--image-size", "8x6", "--batch-size", "4", "--steps", "1"]
    line += ["--graph", "grid,reuse", "--norm", "layer", "--threads", "1", "--out", str(out)]
    assert main(line) == 0
    description = read_description(out / "model.safetensors")
    assert facts_of(description) == ("vig_digits", 2, 3, (8, 6), (0.0,) * 3, (1.0,) * 3)
    assert description.crop_pct == 1.0
    assert description.names() == ("cat", "dog")
    assert description.options == {"norm": "layer", "graph": "grid,reuse"}
    assert description.build().state_dict().keys() == digits(norm="layer").keys()


def test_images_are_prepared_as_in_evaluation(tmp_path):
    root = make_pictures(tmp_path, size=(60, 50))
    state = create_model("vig_cifar_ti", num_classes=2).state_dict()
    facts = {"model": "vig_cifar_ti", "num_classes": "2", "img_size": "32x40"}
    facts |= {"mean": "0.25, 0.5, 0.25", "std": "0.5", "crop_pct": "0.75"}
    description = read_description(save(tmp_path / "w.safetensors", state, **facts))
    mean = (0.25, 0.5, 0.25)
    source = open_source(str(root), image_size=(32, 40), mean=mean, std=0.5, crop_pct=0.75)
    paths = [root / "test" / name / f"{i}.png" for name in ("cat", "dog") for i in range(2)]
    ours = description.split(description.files(paths)).read(range(4))
    theirs = source.test.read(range(4))
    assert torch.equal(ours, theirs)
    assert description.pixels(ours).shape == (4, 32, 40, 3)
    expected = (ours[0].movedim(0, -1) * 0.5 + torch.tensor(mean)).numpy() * 255
    assert np.abs(description.pixels(ours)[0] - expected).max() < 1


@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_image_suits_every_model(channels, tmp_path):
    state, modes = digits(in_chans=channels), ["L", "RGB", "RGBA", "P", "LA"]
    for mode in modes:
        Image.new("L", (8, 8), 51).convert(mode).save(tmp_path / f"{mode}.png")
    description = read_description(save(tmp_path / "w.safetensors", state))
    assert description.in_chans == channels
    paths = [tmp_path / f"{mode}.png" for mode in modes]
    x = description.split(description.files(paths)).read(range(5))
    assert x.shape == (5, channels, 8, 8)
    torch.testing.assert_close(x, torch.full_like(x, 0.2))


def test_the_shapes_tell_what_a_torch_file_does_not(tmp_path):
    state = create_model("vig_cifar_ti", num_classes=7, in_chans=1, img_size=(48, 40)).state_dict()
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    description = read_description(tmp_path / "w.pth")
    assert facts_of(description) == ("vig_cifar_ti", 7, 1, (48, 40), (0.5,), (0.5,))
    assert description.names() == tuple("0123456")
    assert read_description(tmp_path / "w.pth", "vig_cifar_ti", "32").image_size == (32, 32)
    torch.save(create_model("vig_study", num_classes=4).state_dict(), tmp_path / "w.pth")
    assert facts_of(read_description(tmp_path / "w.pth"))[:4] == ("vig_study", 4, 3, (32, 32))


def test_a_thousand_classes_are_those_of_imagenet():
    description = read_description(None, "vig_ti_224")
    assert len(description.names()) == 1000
    assert "tabby" in description.names()[281]
    assert (description.image_size, description.crop_pct) == ((224, 224), 0.9)
    assert read_description(None, "pvig_b_224").crop_pct == 0.95


ODD_METADATA = [
    ({"model": "vig_next"}, "'vig_next'.*this version.*vig_ti_224"),
    ({"num_classes": "many"}, "metadata.*many"),
    ({"mean": "[]"}, r"metadata.*\[\]"),
    ({"img_size": "8by8"}, "8by8"),
    ({"class_names": json.dumps(["a", "b"])}, "2 names for 3 classes"),
    ({"class_names": "{"}, "metadata"),
    ({"norm": "spectral"}, "spectral, expected batch or layer or group"),
    ({"in_chans": "4"}, r"4 channels.*grey \(1\) or colour \(3\)"),
]


def test_odd_metadata_are_refused_in_one_sentence(tmp_path):
    rows, state = [], digits()
    for i, (facts, words) in enumerate(ODD_METADATA):
        path = save(tmp_path / f"{i}.safetensors", state, **{**FACTS, **facts})
        rows.append((partial(read_description, path), words))
    check_refusals(rows)


def test_another_model_than_the_files_is_refused(tmp_path):
    path = save(tmp_path / "w.safetensors", **FACTS)
    assert read_description(path, "vig_digits") == read_description(path)
    with pytest.raises(InputError, match=r"--model vig_ti_224: .*w.safetensors holds a vig_digits"):
        read_description(path, "vig_ti_224")


def test_a_file_of_no_known_model_and_neither_file_nor_model_are_refused(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"w\.pth: "):
        read_description(tmp_path / "w.pth")
    with pytest.raises(InputError, match="--model: say which model, or give --weights"):
        read_description(None)
