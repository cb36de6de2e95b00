"""timm's augmentation of training images, made to depend on an image's own seed only.

timm's transforms draw from the process-wide generators of random, numpy and torch. Here those are
lent to one image at a time, seeded for it, and put back as they were: whoever reads an image, in
whatever order and process, gets the same pixels. Nothing else in the trainer draws from them.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vigpipe.config.choices import RandomCrop
from vigpipe.data import transforms
from vigpipe.errors import InputError

_GENERATORS = threading.Lock()


@dataclass(frozen=True)
class Augmentation:
    """What timm does to a training image, apart from mirroring it.

    Attributes:
        random_crop: `box`, a box of random size and ratio, resized (arXiv:1409.4842), or `shift`,
            the image padded by an eighth of its side by reflection and cut at random.
        auto_augment: timm's random augmentation by name, such as RandAugment (arXiv:1909.13719)
            as `rand-m9-mstd0.5-inc1`; `none` turns it off.
        color_jitter: largest change of brightness, contrast and saturation; timm leaves it out
            under an auto_augment.
        erasing: probability that a box is replaced by noise (arXiv:1708.04896).
    """

    random_crop: RandomCrop = "box"
    auto_augment: str = "none"
    color_jitter: float = 0.0
    erasing: float = 0.0


class TimmAugment:
    """An Augmentation for images of one source.

    Args:
        augmentation: what to do.
        size: (H, W) wanted.
        mean: of the normalised pixels in 0 ... 1; fills what an image moved away from.
        channels: 3, or 1 for greys.
        flip: whether a mirrored image still belongs to its class.

    Raises:
        InputError: timm does not know the auto_augment.
    """

    def __init__(
        self,
        augmentation: Augmentation,
        size: tuple[int, int],
        mean: float,
        channels: int,
        flip: bool,
    ) -> None:
        from timm.data.random_erasing import RandomErasing
        from timm.data.transforms_factory import create_transform

        self._size, self._flip = size, flip
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
                mean=(mean,) * channels,
                std=(1.0,) * channels,  # not used: the caller normalises
                separate=True,
            )
        except Exception as error:  # assertions and whatever int() and re say of odd names
            raise InputError(
                f"--auto-augment {name}: timm knows no such augmentation; choose one such as "
                "rand-m9-mstd0.5-inc1, original, v0, 3a or none"
            ) from error
        self._shifts = augmentation.random_crop == "shift"
        self._steps = (*(() if self._shifts else crop.transforms), *colour.transforms)
        # Where the rows and columns of an image lie that is padded by an eighth of its side.
        self._padded = [np.pad(np.arange(side), side // 8, mode="reflect") for side in size]
        for step in self._steps:
            keep_one_bit(step)
        self._erase = (
            RandomErasing(augmentation.erasing, mode="pixel", device="cpu")
            if augmentation.erasing > 0
            else None
        )

    def __call__(
        self,
        images: Sequence[np.ndarray],
        seeds: Sequence[int],
        normalise: Callable[[np.ndarray], Tensor],
    ) -> Tensor:
        """Augment images.

        Args:
            images: b of (h, w, C) uint8.
            seeds: b from `transforms.image_seed`.
            normalise: (H, W, C) uint8 -> (C, H, W); noise is put in after it.

        Returns:
            (b, C, H, W).
        """
        out: list[Tensor] = []
        with _borrowed_generators():
            for pixels, seed in zip(images, seeds, strict=True):
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed % 2**63)  # not CUDA's, as torch's own does
                out.append(self._augmented(pixels, normalise))
        return torch.stack(out)

    def _augmented(self, pixels: np.ndarray, normalise: Callable[[np.ndarray], Tensor]) -> Tensor:
        if self._shifts:
            pixels = self._shifted(transforms.centre_crop(pixels, self._size))
        if self._steps:
            image: Any = transforms.to_pil(pixels)
            for step in self._steps:
                image = step(image)
            pixels = transforms.to_array(image, pixels.shape[2]).copy()  # Pillow's is read-only
        x = normalise(pixels)
        return x if self._erase is None else self._erase(x)

    def _shifted(self, pixels: np.ndarray) -> np.ndarray:
        rows, columns = (
            padded[start : start + side]
            for padded, side in zip(self._padded, self._size, strict=True)
            for start in [random.randint(0, len(padded) - side)]
        )
        if self._flip and random.random() < 0.5:
            columns = columns[::-1]
        return pixels[np.ix_(rows, columns)]


def keep_one_bit(step: Any) -> None:  # noqa: ANN401
    """Let timm's strongest posterize keep a bit.

    At the highest magnitude timm asks for none. Pillow up to 12 then gives a black image, Pillow 13
    an error, and RandAugment with noise in its magnitude meets that every few hundred images.
    """
    from timm.data.auto_augment import posterize

    policies = getattr(step, "policy", None) or [getattr(step, "ops", None) or []]
    for op in chain.from_iterable(policies):
        if op.aug_fn is posterize:
            op.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:  # noqa: ANN401
    return image if bits >= 8 else ImageOps.posterize(image, max(bits, 1))


@contextmanager
def _borrowed_generators() -> Iterator[None]:
    """Keep other threads' augmentation out, and put the generators back as they were."""
    with _GENERATORS:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
