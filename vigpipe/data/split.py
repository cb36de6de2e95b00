"""The train or the test images of a source, read by index: load, resize, augment, normalise."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vigpipe.data import images, transforms
from vigpipe.errors import InputError

CACHE_BYTES = 256 * 2**20  # per split; CIFAR-10 fits as a folder of files, ImageNet does not
# Threads pay for images above this; of 32×32 files, two threads read 4,500 a second, one 6,800.
THREADS_PAY_BYTES = 64 * 64 * 3


class Split(Protocol):
    """The train or the test images of a source.

    Attributes:
        labels: (n,) int64; known without reading any image.
    """

    labels: np.ndarray

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Read images, ready for the model.

        An image depends on its index and, where it is augmented, on (seed, epoch): never on its
        neighbours, the order, the rank or a process-wide random generator.

        Args:
            indices: b positions in 0 … n−1.
            epoch: counts from 0.

        Returns:
            (b, channels, H, W) float32.

        Raises:
            InputError: an image cannot be read or has another size; the message gives its path.
            IndexError: an index is out of range.
        """
        ...


@dataclass(frozen=True)
class Recipe:
    """What happens to the pixels of an image between its source and the model."""

    image_size: int | None
    mean: float
    std: float
    augment: bool
    seed: int

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"`--image-size` is at least 1 (got {self.image_size})")
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise InputError(
                f"`--mean` is a number and `--std` one above 0 (got {self.mean} and {self.std})"
            )


class ImageSplit:
    """A Split whose images come, one by one, as uint8 pixels of any size.

    Args:
        labels: (n,) integers.
        load: index -> (h, w, C) uint8; may raise InputError.
        channels: C.
        size: (H, W) after resizing.
        recipe: its `augment` holds for this split.
        white: the pixel value that becomes 1.0.
        flip: whether augmentation mirrors.
        cache: keep images that were loaded once, if all of that size are below CACHE_BYTES.
    """

    def __init__(
        self,
        labels: Sequence[int] | np.ndarray,
        load: Callable[[int], np.ndarray],
        channels: int,
        size: tuple[int, int],
        recipe: Recipe,
        white: int = 255,
        flip: bool = True,
        cache: bool = False,
    ) -> None:
        self.labels = np.asarray(labels, dtype=np.int64)
        self._load = load
        self._channels = channels
        self._size = size
        self._recipe = recipe
        self._white = white
        self._flip = flip
        self._cache: dict[int, np.ndarray] = {}
        self._cache_bytes = CACHE_BYTES if cache else 0
        self._threads = ThreadPoolExecutor(images.NUM_THREADS)  # starts none before it is used
        self._largest_bytes = math.prod(size) * channels  # image so far, at any size it had

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """See Split.read."""
        indices = [int(i) for i in indices]
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"image {index} of 0 … {len(self) - 1}")
        pixels = np.empty((len(indices), *self._size, self._channels), dtype=np.uint8)

        def fill(position: int) -> None:
            pixels[position] = self._pixels(indices[position], epoch)

        work = self._recipe.augment or any(index not in self._cache for index in indices)
        if work and self._largest_bytes > THREADS_PAY_BYTES:
            list(self._threads.map(fill, range(len(indices))))  # raises the first error, in order
        else:
            for position in range(len(indices)):
                fill(position)
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()  # (b, C, H, W)
        x = x.float().div_(self._white).clamp_(max=1)  # bicubic resizing overshoots a white of 240
        return x.sub_(self._recipe.mean).div_(self._recipe.std)

    def _pixels(self, index: int, epoch: int) -> np.ndarray:
        """Return (H, W, C) uint8, resized and augmented."""
        pixels = self._cache.get(index)
        if pixels is None:
            pixels = self._load(index)
            self._largest_bytes = max(self._largest_bytes, pixels.nbytes)
            if not self._recipe.augment:
                pixels = transforms.centre_crop(pixels, self._size)
            # Whatever the sizes are, what is kept by this rule stays below CACHE_BYTES.
            if pixels.nbytes * len(self) <= self._cache_bytes:
                self._cache[index] = pixels
        if self._recipe.augment:
            generator = transforms.image_generator(self._recipe.seed, epoch, index)
            pixels = transforms.random_crop(pixels, self._size, generator, self._flip)
        return pixels
