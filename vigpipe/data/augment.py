"""timm's augmentation of training images, made to depend only on a seed of each image.

timm's transforms draw from the process-wide generators of random, numpy and torch. Here these are
seeded for one image at a time, and their states are restored afterwards. So every process that
reads an image, in any order, gets the same pixels. Nothing else in the trainer uses them.
"""

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from vigpipe.config.choices import RandomCrop
from vigpipe.data import transforms
from vigpipe.data.picture import Picture, size_of, to_array, to_pil
from vigpipe.data.pixels import Erasure
from vigpipe.errors import InputError

_GENERATORS = threading.Lock()


@dataclass(frozen=True)
class Augmentation:
    """The augmentation that timm applies to a training image, besides mirroring it."""

    # `box` takes a box of random size and ratio and resizes it (arXiv:1409.4842); `shift` pads the
    # image by an eighth of its side by reflection and crops it at random.
    random_crop: RandomCrop = "box"
    auto_augment: str = "none"  # timm's by name, such as RandAugment (arXiv:1909.13719)
    # Largest change of brightness, contrast and saturation; timm ignores it with auto_augment.
    color_jitter: float = 0.0
    erasing: float = 0.0  # probability that a box is replaced by noise (arXiv:1708.04896)


class TimmAugment:
    """Applies an Augmentation to the images of one source, which then have the size (H, W)."""

    def __init__(
        self,
        augmentation: Augmentation,
        size: tuple[int, int],
        mean: tuple[float, ...],  # of each channel
        flip: bool,
    ) -> None:
        from timm.data.random_erasing import RandomErasing
        from timm.data.transforms_factory import create_transform

        self._size, self._channels, self._flip = size, len(mean), flip
        name = augmentation.auto_augment
        make: Any = create_transform
        try:
            crop, colour, _ = make(
                input_size=size,
                is_training=True,
                scale=transforms.crop_scale(size),
                hflip=0.5 if flip else 0.0,
                color_jitter=augmentation.color_jitter or None,
                auto_augment=None if name == "none" else name,
                interpolation="random",
                mean=mean,  # fills areas that a moved image leaves empty
                std=(1.0,) * len(mean),  # unused, because the caller normalises
                separate=True,
            )
        except Exception as error:  # assertions, and errors of int() and re for odd names
            raise InputError(
                f"--auto-augment {name}: timm knows no such augmentation; choose one such as "
                "rand-m9-mstd0.5-inc1, original, v0, 3a or none"
            ) from error
        self._shifts = augmentation.random_crop == "shift"
        self._steps = (*(() if self._shifts else crop.transforms), *colour.transforms)
        # For each axis of the padded image, which row or column of the image it shows.
        self._padded = [np.pad(np.arange(side), side // 8, mode="reflect") for side in size]
        for step in self._steps:
            keep_one_bit(step)
        self._erase = (
            RandomErasing(augmentation.erasing, mode="pixel", device="cpu")
            if augmentation.erasing > 0
            else None
        )

    def __call__(
        self, images: Iterable[Picture], seeds: Sequence[int]
    ) -> tuple[list[Picture], tuple[Erasure, ...]]:
        """Augment b images of any size to H × W pixels; boxes are to be erased once normalised."""
        out: list[Picture] = []
        erasures: list[Erasure] = []
        with _borrowed_generators():
            for picture, seed in zip(images, seeds, strict=True):
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed % 2**63)  # not CUDA's, as torch's own does
                out.append(self._augmented(picture))
                if self._erase is not None:
                    canvas = _Canvas(len(out) - 1, (self._channels, *size_of(out[-1])))
                    self._erase(canvas)
                    erasures += canvas.erasures
        return out, tuple(erasures)

    def _augmented(self, picture: Picture) -> Picture:
        if self._shifts:
            picture = self._shifted(to_array(transforms.centre_crop(picture, self._size)))
        if self._steps:
            picture = to_pil(picture)
            for step in self._steps:
                picture = step(picture)
        return picture

    def _shifted(self, pixels: np.ndarray) -> np.ndarray:
        rows, columns = (
            padded[start : start + side]
            for padded, side in zip(self._padded, self._size, strict=True)
            for start in [random.randint(0, len(padded) - side)]
        )
        if self._flip and random.random() < 0.5:
            columns = columns[::-1]
        return pixels[np.ix_(rows, columns)]


class _Canvas:
    """Stands in for a normalised image, and notes what timm's RandomErasing writes into it."""

    dtype = torch.float32

    def __init__(self, index: int, shape: tuple[int, int, int]) -> None:  # (C, H, W)
        self._index, self._shape = index, shape
        self.erasures: list[Erasure] = []

    def size(self) -> tuple[int, int, int]:
        return self._shape

    def __setitem__(self, box: tuple[slice, slice, slice], noise: torch.Tensor) -> None:
        _, rows, columns = box
        self.erasures.append(Erasure(self._index, rows.start, columns.start, noise.numpy()))


def keep_one_bit(step: Any) -> None:
    """Make timm's strongest posterize keep one bit per channel, by changing the step in place.

    At the highest magnitude timm keeps none. Pillow up to 12 then gives a black image, Pillow 13
    an error, and RandAugment with noise in its magnitude does so every few hundred images.
    """
    from timm.data.auto_augment import posterize

    policies = getattr(step, "policy", None) or [getattr(step, "ops", None) or []]
    for op in chain.from_iterable(policies):
        if op.aug_fn is posterize:
            op.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    return image if bits >= 8 else ImageOps.posterize(image, max(bits, 1))


@contextmanager
def _borrowed_generators() -> Iterator[None]:
    """Lock out other threads' augmentation, and restore the generators' states afterwards."""
    with _GENERATORS:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
