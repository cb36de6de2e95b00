"""Make a folder of JPEG files like ImageNet's from the two photographs of scikit-learn.

A file has about as many bytes and pixels as ImageNet's have on average, so that decoding it costs
as much. Each picture shows another window of a photograph, which its mirror images continue: moved,
turned, reduced, and changed in brightness, contrast and saturation. It depends only on its number.
"""

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from vigpipe.data.images import NUM_THREADS
from vigpipe.errors import InputError

PHOTOGRAPHS = ("china", "flower")
CLASSES = tuple(f"{name}{kind}" for name in PHOTOGRAPHS for kind in ("", "-mirrored"))
WIDTH, HEIGHT = 500, 375  # pixels, the most frequent size in ImageNet
QUALITY = 97  # of the JPEG files, which makes them 110 KB large on average
_REDUCTION = (1.0, 2.0)  # pixels of the photograph for one of the picture
_LARGEST_ANGLE = math.radians(10)
_STRENGTH = (0.7, 1.3)  # factor of brightness, contrast and saturation; 1 changes nothing


def make_pictures(folder: Path, num_images: int) -> None:
    """Write a data set of train/<class>/<number>.jpg, and a test image of each class.

    The folder appears when it is complete.

    Args:
        folder: to make; it must not exist.
        num_images: number of training images.

    Raises:
        InputError: the photographs are missing, there are fewer images than classes, or the folder
            cannot be written.
    """
    if num_images < len(CLASSES):
        raise InputError(
            f"--images {num_images}: must be at least {len(CLASSES)}, one for each class of "
            f"{', '.join(CLASSES)}"
        )
    photographs = [_read_photograph(name) for name in PHOTOGRAPHS]
    partial_folder = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial_folder, ignore_errors=True)  # what an interrupted call has left
        for split in ("train", "test"):
            for name in CLASSES:
                (partial_folder / split / name).mkdir(parents=True)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            write = partial(_write_picture, photographs)
            list(threads.map(write, _files(partial_folder, num_images), range(num_images + 4)))
        partial_folder.rename(folder)
    except OSError as error:
        raise InputError(
            f"--pictures {folder}: cannot be written ({error.strerror}); choose another folder"
        ) from error


def _files(folder: Path, num_images: int) -> Iterator[Path]:
    for number in range(num_images):
        yield folder / "train" / CLASSES[number % len(CLASSES)] / f"{number:06d}.jpg"
    for name in CLASSES:
        yield folder / "test" / name / "0.jpg"


def _write_picture(photographs: list[Image.Image], path: Path, number: int) -> None:
    label = CLASSES.index(path.parent.name)
    picture = _picture(photographs[label // 2], np.random.default_rng(number))
    if label % 2:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture.save(path, "JPEG", quality=QUALITY)


def _picture(photograph: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Show a random window of a photograph, which must be larger than any window."""
    reduction = generator.uniform(*_REDUCTION)
    angle = generator.uniform(-_LARGEST_ANGLE, _LARGEST_ANGLE)
    cos, sin = math.cos(angle) * reduction, math.sin(angle) * reduction
    x, y = (
        generator.uniform(side * reduction / 2, whole - side * reduction / 2)
        for side, whole in zip((WIDTH, HEIGHT), photograph.size, strict=True)
    )  # of the window's centre
    to_photograph = (
        *(cos, -sin, x - cos * WIDTH / 2 + sin * HEIGHT / 2),
        *(sin, cos, y - sin * WIDTH / 2 - cos * HEIGHT / 2),
    )
    picture = photograph.transform(
        (WIDTH, HEIGHT), Image.Transform.AFFINE, to_photograph, Image.Resampling.BICUBIC
    )
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        picture = change(picture).enhance(generator.uniform(*_STRENGTH))
    return picture


def _read_photograph(name: str) -> Image.Image:
    """Read a photograph, 640×427 pixels, and put its mirror images to the right and below.

    Raises:
        InputError: scikit-learn is missing, or keeps the file elsewhere.
    """
    package = find_spec("sklearn")  # finds the folder without importing the package
    init = Path((package and package.origin) or "sklearn/__init__.py")
    path = init.parent / "datasets" / "images" / f"{name}.jpg"
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise InputError(
            f"{path}: the photograph cannot be read ({error}); it comes with scikit-learn: pip "
            "install scikit-learn, or name a folder of your own images with --pictures"
        ) from error
    height, width, _ = pixels.shape
    return Image.fromarray(np.pad(pixels, ((0, height), (0, width), (0, 0)), "symmetric"))
