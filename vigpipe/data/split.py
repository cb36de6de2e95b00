"""The train or the test images of a source, read by index: load, resize, augment."""

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vigpipe.data import images, transforms
from vigpipe.data.augment import Augmentation, TimmAugment
from vigpipe.data.picture import Picture, size_of, to_array, write_channels
from vigpipe.data.pixels import Normalise, Pixels
from vigpipe.data.stored import Look, StoredImages
from vigpipe.errors import InputError

# Bytes per split and process: enough for CIFAR-10 as a folder of files, not for ImageNet.
CACHE_BYTES = 256 * 2**20
# Reading with threads pays off for images above this size. Of 32×32 files, one thread reads 6,800
# per second, two threads 4,500.
THREADS_PAY_BYTES = 64 * 64 * 3


@dataclass(frozen=True)
class Preparation:
    """How the pixels of an image are prepared for the model, in the words of `open_source`."""

    image_size: tuple[int, int]  # (H, W)
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]
    crop_pct: float = 1.0
    augment: bool | Augmentation = False
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = (*self.mean, *self.std)
        if not (all(map(math.isfinite, numbers)) and all(std > 0 for std in self.std)):
            raise InputError(
                f"mean={self.mean}, std={self.std}: expected numbers, and numbers above 0, by "
                "which the pixels are scaled for the model; correct them"
            )


class Split:
    """The train or the test images of a source, which are loaded one by one.

    The `augment` of the preparation applies to this split. Labels, (n,) int64, are known without
    reading any image.
    """

    def __init__(self, images: StoredImages, look: Look, preparation: Preparation) -> None:
        self.labels = np.asarray(images.labels, dtype=np.int64)
        self._load = images.load
        self._look = look
        self._preparation = preparation
        self._size = size = preparation.image_size
        self._cache: dict[int, np.ndarray] = {}
        self._cache_bytes = CACHE_BYTES if look.is_encoded else 0
        self._largest_bytes = math.prod(size) * look.channels  # size of the largest image so far
        augment = preparation.augment
        self._timm = (
            TimmAugment(augment, size, preparation.mean, look.flip)
            if isinstance(augment, Augmentation)
            else None
        )

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(images.NUM_THREADS)

    def __getstate__(self) -> dict[str, Any]:
        """Let a copy keep no images: worker processes together would keep each several times."""
        state = {name: value for name, value in vars(self).items() if name != "_threads"}
        return {**state, "_cache": {}, "_cache_bytes": 0}

    def decode(
        self,
        indices: Sequence[int],
        epoch: int = 0,
        copies: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pixels:
        """Read images as `read`, but not normalised, into `out`, (b, C, H, W) uint8, if given."""
        indices = [int(i) for i in indices]
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"image {index} of 0 … {len(self) - 1}")
        copies = [0] * len(indices) if copies is None else copies
        seeds = [
            transforms.image_seed(self._preparation.seed, epoch, i, copy)
            for i, copy in zip(indices, copies, strict=True)
        ]
        has_work = self._preparation.augment or any(index not in self._cache for index in indices)
        use_threads = (
            has_work and self._largest_bytes > THREADS_PAY_BYTES and images.NUM_THREADS > 1
        )
        # Either way the error of the first bad image is raised.
        pictures = (self._threads.map if use_threads else map)(self._picture, indices, seeds)
        erasures = ()
        if self._timm is not None:
            pictures, erasures = self._timm(pictures, seeds)
        if out is None:
            shape = (len(indices), self._look.channels, *self._size)
            out = torch.empty(shape, dtype=torch.uint8)
        for pixels, picture in zip(out.numpy(), pictures, strict=True):
            write_channels(picture, pixels)
        return Pixels(out, erasures)

    def normaliser(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        send: Callable[[Tensor], Tensor] | None = None,
    ) -> Normalise:
        """Return what normalises the result of `decode` for a model, by default on the CPU."""
        mean, std = self._preparation.mean, self._preparation.std
        return Normalise(self._look.white, mean, std, dtype, device, send)

    def read(
        self, indices: Sequence[int], epoch: int = 0, copies: Sequence[int] | None = None
    ) -> Tensor:
        """Read images, normalised for the model, on the CPU: (b, C, H, W) float32.

        The result for an image depends on its index in 0 … n−1 and, if it is augmented, on seed,
        epoch and copy, which distinguishes its visits in one epoch. It never depends on the other
        images, the order, the rank or a process-wide random generator. An image that cannot be
        read, or has another size, is an InputError, which gives its path.
        """
        pixels = self.decode(indices, epoch, copies)
        return self.normaliser()([pixels], len(pixels.images), pixels.images.shape[1:])

    def _picture(self, index: int, seed: int) -> Picture:
        """Return an image of the model's size, or, for timm's augmentation, as it is stored."""
        picture: Picture | None = self._cache.get(index)
        if picture is None:
            picture = self._load(index)
            self._largest_bytes = max(self._largest_bytes, self._bytes_of(picture))
            if not self._preparation.augment:
                picture = transforms.centre_crop(picture, self._size, self._preparation.crop_pct)
            # Whatever the sizes of the images, this rule keeps the cache below CACHE_BYTES.
            if self._bytes_of(picture) * len(self) <= self._cache_bytes:
                self._cache[index] = picture = to_array(picture)
        if self._preparation.augment is True:
            generator = random.Random(seed)
            picture = transforms.random_crop(picture, self._size, generator, self._look.flip)
        return picture

    def _bytes_of(self, picture: Picture) -> int:
        return math.prod(size_of(picture)) * self._look.channels
