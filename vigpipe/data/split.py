"""The train or the test images of a source, read by index: load, resize, augment, normalise."""

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vigpipe.data import images, transforms
from vigpipe.data.augment import Augmentation, TimmAugment
from vigpipe.data.stored import Look, StoredImages
from vigpipe.errors import InputError

CACHE_BYTES = (
    256 * 2**20
)  # per split and process: enough for CIFAR-10 as a folder of files, not for ImageNet
# Reading with threads pays off for images above this size. Of 32×32 files, one thread reads 6,800
# per second, two threads 4,500.
THREADS_PAY_BYTES = 64 * 64 * 3


class Split(Protocol):
    """The train or the test images of a source.

    Attributes:
        labels: (n,) int64; known without reading any image.
    """

    labels: np.ndarray

    def __len__(self) -> int: ...

    def read(
        self, indices: Sequence[int], epoch: int = 0, copies: Sequence[int] | None = None
    ) -> Tensor:
        """Read images, ready for the model.

        The result for an image depends on its index and, if it is augmented, on seed, epoch and
        copy. It never depends on the other images, the order, the rank or a process-wide random
        generator.

        Args:
            indices: b indices in 0 … n−1.
            epoch: index of the epoch, from 0.
            copies: b numbers that distinguish the visits of an image in one epoch; by default 0.

        Returns:
            (b, channels, H, W) float32.

        Raises:
            InputError: an image cannot be read or has another size; the message gives its path.
            IndexError: an index is out of range.
        """
        ...


@dataclass(frozen=True)
class Preparation:
    """How the pixels of an image are prepared for the model.

    Attributes:
        image_size: (H, W) of the result in pixels.
        mean: mean that is subtracted from the pixels, which lie in 0 … 1.
        std: standard deviation that the pixels are divided by afterwards.
        crop_pct: fraction of the side of a resized test image that is kept.
        augment: how training images are augmented: True takes a random box and mirrors, an
            Augmentation applies timm's, False means not at all.
        seed: seed of the augmentation.
    """

    image_size: tuple[int, int]
    mean: float
    std: float
    crop_pct: float = 1.0
    augment: bool | Augmentation = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise InputError(
                f"`--mean` is a number and `--std` one above 0 (got {self.mean} and {self.std})"
            )


class ImageSplit:
    """A Split that loads its images one by one, as uint8 pixels of any size.

    Args:
        images: what is loaded.
        look: what their pixels are.
        preparation: how images are prepared; its `augment` applies to this split.
    """

    def __init__(self, images: StoredImages, look: Look, preparation: Preparation) -> None:
        self.labels = np.asarray(images.labels, dtype=np.int64)
        self._load = images.load
        self._look = look
        self._preparation = preparation
        self._size = size = preparation.image_size
        self._cache: dict[int, np.ndarray] = {}
        self._cache_bytes = CACHE_BYTES if look.is_encoded else 0
        self._largest_bytes = math.prod(size) * look.channels  # largest loaded image so far
        augment = preparation.augment
        self._timm = (
            TimmAugment(augment, size, preparation.mean, look.channels, look.flip)
            if isinstance(augment, Augmentation)
            else None
        )
        self._empty = torch.empty(0, look.channels, *size)

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(images.NUM_THREADS)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle everything but the threads and the cached images."""
        state = {name: value for name, value in vars(self).items() if name != "_threads"}
        return {**state, "_cache": {}}

    def read(
        self, indices: Sequence[int], epoch: int = 0, copies: Sequence[int] | None = None
    ) -> Tensor:
        """Read images, ready for the model, as `Split.read` describes.

        Args:
            indices: b indices in 0 … n−1.
            epoch: index of the epoch, from 0.
            copies: b numbers that distinguish the visits of an image in one epoch; by default 0.

        Returns:
            (b, channels, H, W) float32.

        Raises:
            InputError: an image cannot be read or has another size; the message gives its path.
            IndexError: an index is out of range.
        """
        indices = [int(i) for i in indices]
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"image {index} of 0 … {len(self) - 1}")
        if not indices:
            return self._empty
        copies = [0] * len(indices) if copies is None else copies
        seeds = [
            transforms.image_seed(self._preparation.seed, epoch, i, copy)
            for i, copy in zip(indices, copies, strict=True)
        ]
        has_work = self._preparation.augment or any(index not in self._cache for index in indices)
        if has_work and self._largest_bytes > THREADS_PAY_BYTES:
            pixels = list(
                self._threads.map(self._pixels, indices, seeds)
            )  # raises the first image's error first
        else:
            pixels = [self._pixels(*pair) for pair in zip(indices, seeds, strict=True)]
        if self._timm is not None:
            return self._timm(pixels, seeds, self._normalised)
        return self._normalised(np.stack(pixels))

    def _pixels(self, index: int, seed: int) -> np.ndarray:
        """Return an image resized and cropped, (H, W, C) uint8, without timm's augmentation."""
        pixels = self._cache.get(index)
        if pixels is None:
            pixels = self._load(index)
            self._largest_bytes = max(self._largest_bytes, pixels.nbytes)
            if not self._preparation.augment:
                pixels = transforms.centre_crop(pixels, self._size, self._preparation.crop_pct)
            # Whatever the sizes of the images, this rule keeps the cache below CACHE_BYTES.
            if pixels.nbytes * len(self) <= self._cache_bytes:
                self._cache[index] = pixels
        if self._preparation.augment is True:
            generator = random.Random(seed)
            pixels = transforms.random_crop(pixels, self._size, generator, self._look.flip)
        return pixels

    def _normalised(self, pixels: np.ndarray) -> Tensor:
        """Normalise pixels: (..., H, W, C) uint8 -> (..., C, H, W) float32."""
        x = torch.from_numpy(pixels).movedim(-1, -3).contiguous()
        x = (
            x.float().div_(self._look.white).clamp_(max=1)
        )  # bicubic resizing overshoots a white of 240
        return x.sub_(self._preparation.mean).div_(self._preparation.std)
