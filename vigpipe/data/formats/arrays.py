"""Arrays of pixels in files: mapped where they are not compressed, so that processes share them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from vigpipe.data.images import LARGEST_RATIO
from vigpipe.data.per_process import PerProcess
from vigpipe.errors import InputError
from vigpipe.files.npy import fill

MOST_UNPACKED = 2 << 30  # bytes of compressed arrays, which every process unpacks into its memory
_MOST_IMAGES = 1 << 26  # their labels, int64, have 512 MB; those of a small file may all be equal


@dataclass(frozen=True)
class ArrayImages:
    """Reads the images of an array."""

    pixels: PerProcess[np.ndarray]  # (n, h, w) or (n, h, w, C) uint8
    name: str

    def __call__(self, index: int) -> np.ndarray:
        image = np.array(self.pixels()[index])  # The copy can be written to.
        return image[..., None] if image.ndim == 2 else image

    def name_of(self, index: int) -> str:
        return f"{self.name}: image {index}"

    def marks(self) -> Iterable[bytes]:
        yield repr(self.pixels().shape).encode()


def check_sides(shape: tuple[int, ...], name: str) -> None:
    """Refuse a shape (n, h, w) or (n, h, w, C) of no images, or of too many or too large ones."""
    num_images, height, width = shape[:3]
    if num_images < 1:
        raise InputError(f"{name}: has no images, expected at least one; it may be the wrong file")
    if num_images > _MOST_IMAGES:
        raise InputError(
            f"{name}: has {num_images} images, expected at most {_MOST_IMAGES}; it may be damaged, "
            "or save them as files or in tars"
        )
    most = Image.MAX_IMAGE_PIXELS or math.inf
    if min(height, width) < 1 or height * width > most:
        raise InputError(
            f"{name}: its images have {width}×{height} pixels, where 1 … {most} pixels are "
            "expected; it may be damaged"
        )
    if max(height, width) > LARGEST_RATIO * min(height, width):
        raise InputError(
            f"{name}: its images have {width}×{height} pixels, where one side is at most "
            f"{LARGEST_RATIO} times the other; it may be damaged"
        )


def map_pixels(path: Path, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """Map uncompressed pixels, uint8 in C order, which begin at an offset in a file."""
    try:
        return np.memmap(path, np.uint8, "r", offset, shape)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be mapped into memory ({error})") from error


def unpack_pixels(stream: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
    """Read pixels, uint8 in C order, from a stream that decompresses, and has to end with them."""
    pixels = np.empty(shape, np.uint8)
    if missing := fill(pixels.data.cast("B"), stream):
        raise EOFError(f"{missing} of {pixels.nbytes} bytes of pixels are missing")
    if stream.read(1):
        raise ValueError("there are more bytes than pixels")
    return pixels
