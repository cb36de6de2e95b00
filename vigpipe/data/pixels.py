"""Batches of uint8 pixels, and how a device makes of them what a model takes.

Whoever reads images decodes, crops and augments them as uint8. Normalising them, which makes them
four times as large, and erasing are left to the device that computes with them.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_IN_CACHE_BYTES = 1 << 18  # pixels that a CPU normalises at once, so that they stay in its cache


class Erasure(NamedTuple):
    """A box of an image of the batch that is replaced by noise once the image is normalised."""

    image: int
    top: int
    left: int
    noise: np.ndarray  # (C, h, w) float32


class Pixels(NamedTuple):
    """Images that are decoded, cropped and augmented, but neither normalised nor erased."""

    images: Tensor  # (b, C, H, W) uint8
    erasures: tuple[Erasure, ...] = ()


class Normalise:
    """Makes of pixels what a model takes, on the device of the model.

    The pixel value `white` becomes 1.0; then the mean of the channel is subtracted, and the result
    divided by its standard deviation. A pixel has 256 values, so a table says what each becomes.
    The CPU computes it, and every device gets the same bits. `send` copies a tensor of the host to
    the device; it is None if they are the same.
    """

    def __init__(
        self,
        white: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        send: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        table = torch.arange(256, dtype=torch.uint8).float().div_(white)
        table.clamp_(max=1)  # bicubic resizing overshoots a white of 240
        self._device = device or torch.device("cpu")
        of_channels = list(zip(mean, std, strict=True))
        if len(set(of_channels)) == 1:  # they share a table
            of_channels = of_channels[:1]
        tables = [table.sub(mean).div_(std) for mean, std in of_channels]
        self._table = torch.cat(tables).to(self._device, dtype)
        firsts = 256 * torch.arange(len(tables), dtype=torch.int32, device=self._device)
        self._firsts = firsts.view(-1, 1, 1) if len(tables) > 1 else None  # of each channel's
        self._send = send

    def __call__(self, parts: Iterable[Pixels], num_images: int, shape: tuple[int, ...]) -> Tensor:
        """Normalise and erase b images of a shape (C, H, W): (b, C, H, W) on the device.

        A part of the batch is not needed any more when the next is asked for.
        """
        # Always a new tensor: convolutions choose their algorithm by the strides, and for images of
        # one channel the strides of others do not determine the memory format.
        out = torch.empty((num_images, *shape), dtype=self._table.dtype, device=self._device)
        start = 0
        for images, erasures in parts:
            normalised = out[start : start + len(images)]
            self._look_up(images, normalised)
            for i, top, left, noise in erasures:
                _, height, width = noise.shape
                box = normalised[i, :, top : top + height, left : left + width]
                box.copy_(self._sent(torch.from_numpy(noise)))
            start += len(images)
        return out

    def _look_up(self, images: Tensor, out: Tensor) -> None:
        is_here = self._send is None
        at_once = _IN_CACHE_BYTES // math.prod(images.shape[1:]) if is_here else len(images)
        at_once = max(1, at_once)
        for some, result in zip(self._sent(images).split(at_once), out.split(at_once), strict=True):
            entries = some.flatten().int()
            if self._firsts is not None:
                entries = (entries.view(some.shape) + self._firsts).view(-1)
            torch.index_select(self._table, 0, entries, out=result.view(-1))

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor if self._send is None else self._send(tensor)
