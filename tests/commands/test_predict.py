"""`vigpipe predict`: the right classes in the right order, equal for every layout."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vigpipe
from tests.commands.refusals import check_commands, refused
from tests.predicted import predicted
from tests.world import run_command, run_each
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PredictConfig
from vigpipe.inference.description import read_description
from vigpipe.inference.predict import (
    Prediction,
    list_files,
    most_likely,
)
from vigpipe.inference.samples import ImageSamples
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
NAMES = ["bee", "cat", "dog", "eel", "fly", "gnu", "hen"]


@pytest.fixture(autouse=True)
def here(here, monkeypatch):
    """A working folder with a model of seven classes and seven images of many kinds."""
    monkeypatch.setattr("vigpipe.launch.local.preload", lambda *modules: None)
    random = np.random.default_rng(0)
    for i in range(7):
        folder = here / "photos" / ("deep/er" if i > 4 else "")
        folder.mkdir(parents=True, exist_ok=True)
        colour = random.integers(1, 257, 3)
        pixels = random.integers(0, colour, (10 + i, 9, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    save(model_of_seven(), "w.safetensors")
    return here


def model_of_seven():
    """A model that tells the images apart: without what it says of all of them."""
    torch.manual_seed(0)
    model = create_model("vig_digits", num_classes=7).eval()
    description = replace(read_description(None, "vig_digits"), in_chans=3)
    images = description.split(description.files(list_files([Path("photos")])))
    with torch.no_grad():
        logits = model(images.read(range(7)))  # (7, 7)
        model.get_parameter("prediction.4.bias").sub_(logits.mean(0))
    return model


def save(model, path):
    facts = {"model": "vig_digits", "num_classes": "7", "in_chans": "3", "img_size": "8x8"}
    save_weights(Path(path), model.state_dict(), {**facts, "class_names": json.dumps(NAMES)})


def told(capsys, *arguments: str) -> list[dict]:
    assert main(["predict", "--weights", "w.safetensors", "--format", "json", *arguments]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    return [json.loads(line) for line in stdout.splitlines()]


def test_predictions_are_those_of_the_model_image_by_image(capsys):
    """The logits reach 105; against float64, torch moves them by 5e-5, and oneDNN by 1.2e-4."""
    model = vigpipe.prepack(model_of_seven())
    description = read_description(Path("w.safetensors"))
    files = list_files([Path("photos")])
    rows = told(capsys, "photos", "--batch-size", "4", "--microbatches", "3", "--threads", "1")
    assert [row["image"] for row in rows] == [str(file) for file in files]
    assert len({row["top"][0]["class"] for row in rows}) > 1
    for file, row in zip(files, rows, strict=True):
        with torch.no_grad():
            logits = model(description.split(description.files([file])).read([0]))[0]
        likely = logits.double().softmax(0).sort(descending=True)
        assert [each["label"] for each in row["top"]] == likely.indices[:5].tolist()
        assert [each["class"] for each in row["top"]] == [NAMES[i] for i in likely.indices[:5]]
        found = [each["probability"] for each in row["top"]]
        np.testing.assert_allclose(found, likely.values[:5], atol=1e-5)


def test_text_is_a_block_for_every_image(capsys):
    assert main(["predict", "--weights", "w.safetensors", "photos/0.png", "photos/1.png"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    for i, block in enumerate(stdout.removesuffix("\n\n").split("\n\n")):
        first, *lines = block.splitlines()
        assert first == f"photos/{i}.png"
        assert [bool(re.fullmatch(r"[ \d]{4}\.\d\d%  [a-z]{3}", line)) for line in lines] == [1] * 5


def test_the_order_is_that_of_the_command_line(capsys):
    rows = told(capsys, "photos/3.png", "photos/deep", "photos/0.png", "photos/3.png")
    names = "3.png", "deep/er/5.png", "deep/er/6.png", "0.png", "3.png"
    assert [row["image"] for row in rows] == [f"photos/{name}" for name in names]
    labels = [[each["label"] for each in row["top"]] for row in rows]
    assert labels[0] == labels[-1] != labels[1]


def test_a_name_of_no_encoding_is_printed_all_the_same():
    odd = Prediction(Path("photos/\udc80.png"), (0,), ("bee",), (1.0,))
    assert odd.as_text().splitlines() == ["photos/\\x80.png", " 100.00%  bee"]
    assert json.loads(odd.as_json())["image"] == "photos/\udc80.png"


def test_equal_classes_are_told_in_the_order_of_their_labels():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [torch.inf, 0, 0, 0, 0, 0]])
    probabilities, labels = most_likely(logits)
    assert labels[0].tolist() == [1, 2, 4, 0, 5]
    assert probabilities.dtype == torch.float64
    assert probabilities[0].isfinite().all()
    assert probabilities[1].isnan().all()
    assert most_likely(torch.tensor([[0.0, 1.0]]))[1].tolist() == [[1, 0]]  # no five of them


def on_rank(rank, world_size, config, given):
    """What a rank gets: everything on ranks of the last stage, nothing on the others."""
    torch.set_num_threads(1)
    samples = ImageSamples.of_files(config, list_files(given))
    rank_state = make_rank_state(samples.run, rank, CPU)
    found = predicted(samples, rank_state)
    assert bool(found) == rank_state.pipeline.has_last
    return found


LAYOUTS: dict[int, list[dict[str, Any]]] = {  # by the ranks that they need
    2: [
        {"stages": 2, "microbatches": 4},
        {"dp": 2, "microbatches": 2},
        {"stages": 2, "virtual_stages": 2, "schedule": "interleaved1f1b", "microbatches": 4},
    ],
    4: [{"stages": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"}],
}


@pytest.mark.multiprocess
def test_every_layout_predicts_the_same(here):
    config: dict[str, Any] = {"weights": here / "w.safetensors", "batch_size": 5}
    torch.set_num_threads(1)
    reference = on_rank(0, 1, PredictConfig(**config, microbatches=4), [here / "photos"])
    assert len(reference) == 7
    for world_size, layouts in LAYOUTS.items():
        several = [PredictConfig(**config, **layout) for layout in layouts]
        of_photos = partial(on_rank, given=[here / "photos"])
        for by_rank in run_each(of_photos, world_size, several):
            assert all(found in ([], reference) for found in by_rank)


@pytest.mark.multiprocess
def test_the_command_starts_its_ranks_and_prints_once(here, capsys):
    line = [sys.executable, "-m", "vigpipe", "predict", "--weights", "w.safetensors", "photos"]
    line += ["--format", "json", "--threads", "1", "--batch-size", "6"]
    done = run_command([*line, "--stages", "2", "--dp", "2", "--microbatches", "2"])
    assert (done.returncode, done.stderr) == (0, "")
    rows = told(capsys, "photos", "--batch-size", "6", "--microbatches", "4", "--threads", "1")
    assert [json.loads(line) for line in done.stdout.splitlines()] == rows
    assert sorted(path.name for path in here.iterdir()) == ["photos", "w.safetensors"]


@pytest.mark.multiprocess
def test_logits_that_are_no_numbers_end_every_rank_without_a_prediction(here, capsys):
    line = ["predict", "--weights", "w.safetensors", "photos"]
    model = model_of_seven()
    with torch.no_grad():
        model.get_parameter("prediction.4.weight")[3] = 3e38  # finite, but no sum of such is
    save(model, "w.safetensors")
    for options in (["--stages", "2", "--threads", "1"], []):
        if options:
            done = run_command([sys.executable, "-m", "vigpipe", *line, *options])
            code, stdout, stderr = done.returncode, done.stdout, done.stderr
        else:
            code, (stdout, stderr) = main(line), capsys.readouterr()
        assert (code, stdout) == (76, "")
        (sentence,) = stderr.splitlines()
        assert sentence.startswith("vigpipe: photos/0.png: the model's logits are NaN or infinite")


def test_unreadable_images_are_refused_or_left_out_and_counted(capsys, here):
    (here / "photos" / "1.png").write_bytes(b"no picture")
    line = ["predict", "--weights", "w.safetensors", "photos", "--format", "json"]
    sentence = refused(capsys, *line)
    assert "photos/1.png: cannot be read as an image" in sentence
    assert "--skip-bad-images" in sentence
    assert main([*line, "--skip-bad-images"]) == 0
    stdout, stderr = capsys.readouterr()
    assert len(stdout.splitlines()) == 6
    assert "1.png" not in stdout
    assert stderr == "vigpipe: left out as unreadable: 1 image (photos/1.png)\n"
    (here / "bad.png").write_bytes(b"")
    line = ["predict", "--weights", "w.safetensors", "bad.png", "--skip-bad-images"]
    assert "none of the images can be read" in refused(capsys, *line)


def test_images_of_another_size_fit_and_too_few_nodes_are_noted(capsys):
    assert len(told(capsys, "photos", "--image-size", "8x12")) == 7
    assert main(["predict", *OURS.split(), "--image-size", "2"]) == 0
    stdout, stderr = capsys.readouterr()
    assert len(stdout.splitlines()) == 7 * 7
    (note,) = stderr.splitlines()
    assert note.startswith("vigpipe: note: images of 2x2 give too few nodes")


OURS = "--weights w.safetensors photos"
WRONG = [
    ("photos", "--weights"),
    ("--weights w.safetensors", "name image files or folders"),
    (f"{OURS} b.png", "b.png", "no such file or folder"),
    (f"{OURS} empty", "empty", "holds no images"),
    ("--weights v.pth photos", "v.pth", "No such file"),
    ("--weights photos/0.png photos", "photos/0.png"),
    ("--weights gray.safetensors photos", "stem.convs.0.weight"),  # of another shape than it says
    (f"{OURS} --model vig_ti_224", "holds a vig_digits"),
    (f"{OURS} --stages 5", "5 stages for 4 blocks"),
    (f"{OURS} --dp 0", "--dp 0", "at least 1"),
    (f"{OURS} --batch-size 2 --microbatches 3", "3 micro-batches", "--batch-size 2"),
    (f"{OURS} --batch-size 0", "--batch-size 0"),
    (f"{OURS} --lr 1", "--lr"),  # an option of train
    (f"{OURS} --device cuda", "no GPU", "--device cpu"),
]


def test_wrong_use_is_told_in_one_sentence(capsys, here, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (here / "empty").mkdir()
    save(create_model("vig_digits", num_classes=7, in_chans=1), "gray.safetensors")
    check_commands(capsys, "predict", WRONG)


def test_weights_for_another_size_are_the_same_in_training_and_prediction():
    """Tables of a file for images of 32 x 32, which both interpolate as published."""
    name, size, compat = "pvig_cifar_ti", (24, 40), "reference"
    state = create_model(name, num_classes=10, compat=compat).state_dict()
    for key, tensor in state.items():
        if key.endswith("relative_pos"):
            tensor += torch.rand(tensor.shape)
    path = Path("w.safetensors")
    facts = {"model": name, "num_classes": "10", "in_chans": "3", "img_size": "32x32"}
    save_weights(path, state, {**facts, "compat": compat})
    expected = create_model(name, num_classes=10, compat=compat, checkpoint_path=path)
    assert isinstance(expected, VisionGnn)
    expected.set_input_size(size)

    options = TrainConfig(model=name, data="fake", image_size="24x40", compat=compat, weights=path)
    trained = prepare(options, torch.float32).build()
    images = list_files([Path("photos")])
    config = PredictConfig(weights=path, image_size="24x40")
    for model in (trained, ImageSamples.of_files(config, images).run.build()):
        own = model.state_dict()
        for key, tensor in expected.state_dict().items():
            assert torch.equal(own[key], tensor), key
