"""Images as cameras, scanners and browsers leave them: every command gives its model the same."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.test_images import READ
from vigpipe.cli import main
from vigpipe.data.images import FORMATS
from vigpipe.inference.load import load
from vigpipe.model.vig import VisionGnn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

ORIENTATION = 0x0112
LEFT_OUT = ("as thin as may be.png",)  # 256 to 1; it is resized to one line


def odd_images() -> dict[str, bytes]:
    """Forty files and more by their names, which tell how they are odd."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (12, 10, 4), dtype=np.uint8)
    clear, colour = Image.fromarray(pixels), Image.fromarray(pixels[..., :3])
    grey = Image.fromarray(pixels[..., 0])
    found: dict[str, bytes] = {name: READ[name][0] for name in READ if name not in LEFT_OUT}

    def save(name: str, image: Image.Image, **options) -> None:
        file = io.BytesIO()
        image.save(file, options.pop("format", None) or Path(name).suffix[1:], **options)
        found[name] = file.getvalue()

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        save(f"turned {orientation}.jpeg", colour, exif=exif)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    save("turned 6.png", clear, exif=exif)
    save("turned 6.tiff", colour, exif=exif)
    save("turned 6 cmyk.jpeg", colour.convert("CMYK"), exif=exif)
    if "MPO" in FORMATS:
        others = {"save_all": True, "append_images": [colour.rotate(180)]}
        save("two views.mpo.jpg", colour, format="MPO", **others)
        save("turned 6 two views.mpo.jpg", colour, format="MPO", exif=exif, **others)
    palette = colour.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    save("transparent palette.png", palette, transparency=bytes([0, 128, 255]))
    save("transparent palette.gif", palette, transparency=3)
    save("animated.png", clear, save_all=True, append_images=[clear.rotate(180)])
    save("animated palette.gif", palette, save_all=True, append_images=[palette.rotate(180)])
    save("grey.jpeg", grey)
    save("grey and transparent.png", clear.convert("LA"))
    save("cmyk.tiff", colour.convert("CMYK"))
    save("interlaced.gif", palette, interlace=1)
    save("colours.ppm", colour)
    save("progressive.jpeg", colour, progressive=True)
    return found


def test_train_evaluate_predict_graph_and_explain_give_the_same_tensors(here, monkeypatch, capsys):
    files = odd_images()
    assert len(files) >= 40
    for split in ("train", "test"):
        for i, (name, content) in enumerate(files.items()):
            folder = here / "pictures" / split / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    paths = sorted((here / "pictures" / "test").glob("*/*"), key=str)
    given: list[torch.Tensor] = []
    embed = VisionGnn.embed
    monkeypatch.setattr(
        VisionGnn, "embed", lambda self, x: (given.append(x.detach().clone()), embed(self, x))[1]
    )

    for drawn in ("commands.graph.draw", "inference.explain.views.draw_explanation"):
        monkeypatch.setattr(f"vigpipe.{drawn}", lambda *_: None)  # it would take most of the time

    def of(*command: str) -> torch.Tensor:
        given.clear()
        assert main([*command, "--image-size", "8"]) == 0, capsys.readouterr().err
        capsys.readouterr()
        return torch.cat(given)

    options = ("--model", "vig_digits", "--batch-size", str(len(files)), "--warmup-epochs", "0")
    trained = of("train", "--data", "pictures", "--epochs", "1", "--out", "run", *options)
    weights = ("--weights", "run/model.safetensors")
    model, transform, _ = load("run/model.safetensors")
    expected = torch.stack([transform(path) for path in paths])
    both = ("--batch-size", str(len(files)))
    assert torch.equal(of("predict", *map(str, paths), *weights, *both), expected)
    assert torch.equal(of("evaluate", *weights, "--data", "pictures", *both), expected)
    # The order of the training is another, and its own evaluation follows.
    assert torch.equal(trained[len(files) :], expected)
    order = [trained[: len(files)].flatten(1).tolist(), expected.flatten(1).tolist()]
    assert sorted(order[0]) == sorted(order[1])
    for path, tensor in zip(paths, expected, strict=True):
        assert torch.equal(of("graph", "--image", str(path), *weights), tensor[None])
        explained = of("explain", "--image", str(path), *weights, "--most", "1")
        assert torch.equal(explained[:1], tensor[None])
    assert model.in_chans == 3
