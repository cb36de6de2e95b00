"""vigpipe.load and vigpipe.predict: the model, transform and names of a file, and no others."""

import json
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

import vigpipe
from tests.test_cli import make_pictures
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.inference.prepack import prepack
from vigpipe.model.variants import create_model

NAMES = ("ant", "bee", "cow")


def configuration(model) -> dict[str, Any]:
    """What timm knows of a model."""
    return model.pretrained_cfg


def timms(model) -> tuple[dict[str, Any], Any]:
    """timm's configuration and transform for a model."""
    config = timm.data.resolve_model_data_config(model)
    return config, timm.data.create_transform(**config, is_training=False)  # pyrefly: ignore[bad-argument-type]


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(1)
    state = create_model("vig_cifar_ti", num_classes=3, img_size=(40, 32)).state_dict()
    facts = {"model": "vig_cifar_ti", "num_classes": "3", "in_chans": "3", "img_size": "40x32"}
    facts |= {"mean": "0.25", "std": "0.125", "crop_pct": "0.75"}
    path = tmp_path / "w.safetensors"
    save_weights(path, state, {**facts, "class_names": json.dumps(NAMES)})
    return path


def test_a_loaded_model_is_that_of_the_file_and_leaves_random_numbers_alone(weights):
    torch.manual_seed(5)
    model, transform, names = vigpipe.load(weights)
    assert torch.initial_seed() == 5
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert names == NAMES
    assert not model.training
    torch.manual_seed(1)
    trained = create_model("vig_cifar_ti", num_classes=3, img_size=(40, 32)).eval()
    x = torch.stack([transform(Image.new("RGB", (50, 60), "teal"))])
    assert x.shape == (1, 3, 40, 32)
    with torch.no_grad():
        assert torch.equal(model(x), trained(x))


def test_the_transform_is_that_of_evaluation_and_timms_for_the_models_configuration(
    weights, tmp_path
):
    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    model, transform, _ = vigpipe.load(str(weights))
    x = transform(path)
    assert torch.equal(x, transform(Image.open(path)))
    description = transform.description
    assert torch.equal(x, description.split(description.files([path])).read([0])[0])
    config, _ = timms(model)
    assert config["input_size"] == (3, 40, 32)
    assert (config["mean"], config["std"], config["crop_pct"]) == ((0.25,) * 3, (0.125,) * 3, 0.75)
    assert configuration(model)["num_classes"] == 3
    assert configuration(model)["label_names"] == NAMES


def test_timms_transform_of_a_square_model_gives_the_same_pixels(tmp_path):
    state = create_model("vig_cifar_ti", num_classes=2).state_dict()
    facts = {"model": "vig_cifar_ti", "num_classes": "2", "mean": "0.4", "std": "0.2"}
    save_weights(tmp_path / "w.safetensors", state, {**facts, "crop_pct": "0.875"})
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    model, transform, _ = vigpipe.load(tmp_path / "w.safetensors")
    _, theirs = timms(model)
    difference = (transform(image) - theirs(image)).abs().max() * 0.2 * 255
    assert difference <= 1.01  # of 255: the two round once


def test_a_model_of_a_torch_file_has_the_variants_configuration_and_its_own_sizes(tmp_path):
    state = create_model("vig_cifar_ti", num_classes=4, in_chans=1).state_dict()
    torch.save(state, tmp_path / "w.pth")
    model = vigpipe.load(tmp_path / "w.pth").model
    assert configuration(model)["num_classes"] == 4
    assert configuration(model)["input_size"] == (1, 32, 32)
    assert configuration(model)["mean"] == (0.5,)
    assert "label_names" not in configuration(model)


def test_predictions_are_those_of_the_command(weights, tmp_path, capsys, monkeypatch):
    prepacked = []
    for module in ("load", "outputs"):
        target = f"vigpipe.inference.{module}.prepack"
        monkeypatch.setattr(target, lambda *a: prepacked.append(a) or prepack(*a))
    root = make_pictures(tmp_path / "pictures", size=(50, 41)) / "test"
    line = ["predict", "--weights", str(weights), str(root), "--format", "json"]
    threads = torch.get_num_threads()
    assert main([*line, "--batch-size", "3", "--threads", str(threads)]) == 0
    told = capsys.readouterr().out.splitlines()
    predictions = vigpipe.predict(weights, root, batch_size=3)
    assert [each.as_json() for each in predictions] == told
    assert len(prepacked) == 2  # by the command, and in Python
    again = vigpipe.predict(vigpipe.load(weights), [str(predictions[0].image)])
    assert again[0].names == predictions[0].names
    with pytest.raises(vigpipe.InputError, match="batch_size 0"):
        vigpipe.predict(weights, root, batch_size=0)
    with pytest.raises(vigpipe.InputError, match="no such file"):
        vigpipe.predict(weights, "nowhere.png")


def test_logits_that_are_not_numbers_are_an_error(weights, tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    loaded = vigpipe.load(weights)
    loaded.model.get_parameter("prediction.4.bias").data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"a\.png: the model's logits are NaN"):
        vigpipe.predict(loaded, tmp_path / "a.png")


def test_files_that_claim_too_much_and_models_of_graphs_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    state = create_model("vig_digits", num_classes=3, in_chans=1).state_dict()
    facts = {"model": "vig_digits", "num_classes": "3", "in_chans": "1", "img_size": "8x8"}
    for claim in ({"num_classes": str(10**15)}, {"in_chans": str(10**9)}):  # before it is built
        save_weights(path, state, facts | claim)
        with pytest.raises(vigpipe.InputError):
            vigpipe.load(path)
    save_weights(path, {"convs.0.weight": torch.zeros(1)}, {"model": "sage"})
    with pytest.raises(vigpipe.InputError, match="holds a sage, which is a model of a graph"):
        vigpipe.load(path)
