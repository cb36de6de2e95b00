"""A run that goes on leaves images as the run before it did, whatever this version begins with."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file

from vigpipe.checkpoint.manifest import NAME, list_checkpoints, read_manifest
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.cli import main
from vigpipe.config.options import TrainConfig
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.inference.description import read_description
from vigpipe.run.facts import prepare


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    """Pictures whose EXIF says that they lie on their side."""
    monkeypatch.chdir(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        Path(name).mkdir(parents=True)
        shades = np.arange(192, dtype=np.uint8).reshape(8, 8, 3) + len(name)
        Image.fromarray(shades).save(f"{name}/1.png", exif=exif)


def without_exif(run: Path) -> None:
    """Let a run look as those of versions without --exif do."""
    (checkpoint,) = list_checkpoints(run)
    manifest = read_manifest(checkpoint)
    for table in (manifest.config, manifest.weights):
        table.pop("exif")
    (checkpoint / NAME).write_text(replace(manifest).text())
    path = run / "model.safetensors"
    metadata = read_metadata(path)
    assert metadata.pop("exif") == "False"
    save_weights(path, load_file(path), metadata)


def test_a_run_of_an_earlier_version_goes_on_with_images_as_they_lie(capsys):
    line = ["train", "--data", ".", "--batch-size", "2", "--threads", "1"]
    assert main([*line, "--out", "run", "--no-exif", "--steps", "2"]) == 0
    without_exif(Path("run"))
    more = [*line, "--out", "more", "--resume", "run", "--steps", "3"]
    assert main([*more, "--exif"]) == 2
    assert "its --exif is False, this run's is True" in capsys.readouterr().err
    assert main(more) == 0
    assert tomllib.loads(Path("more/config.toml").read_text())["exif"] is False


def test_weights_say_whether_images_are_turned(capsys):
    line = ["train", "--data", ".", "--batch-size", "2", "--threads", "1", "--steps", "1"]
    assert main([*line, "--out", "run"]) == 0
    assert main([*line, "--out", "lying", "--no-exif"]) == 0
    without_exif(Path("lying"))
    file = Path("test/cat/1.png")
    as_trained = {}
    for run, turned in (("run", True), ("lying", False)):
        weights = Path(run, "model.safetensors")
        config = TrainConfig(data=".", weights=weights)
        job = prepare(config, torch.float32).job
        assert job.config.exif is turned
        description = read_description(weights)
        as_trained[run] = job.source.test.read([0])  # pyrefly: ignore[missing-attribute]
        for image in (
            description.split(description.files([file])).read([0]),
            description.prepare(Image.open(file))[None],
        ):
            assert torch.equal(image, as_trained[run])
        opened = Image.open(file)
        description.prepare(opened)  # leaves the caller's image as it was
        upright = ImageOps.exif_transpose(opened)
        assert torch.equal(description.prepare(upright), description.prepare(upright.copy()))
        assert not any(isinstance(key, tuple) for key in opened.info)
    assert torch.equal(as_trained["run"], as_trained["lying"].rot90(-1, (2, 3)))
    assert main([*line, "--weights", "run/model.safetensors", "--no-exif", "--out", "x"]) == 2
    assert "--no-exif: run/model.safetensors was trained with --exif" in capsys.readouterr().err
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 1
