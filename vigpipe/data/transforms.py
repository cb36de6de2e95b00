"""Bring an image to the model's size: centred for evaluation, cropped at random for training.

The random choices of each image come from its own generator, seeded by seed, epoch, index and copy.
The transforms of timm and torchvision draw from the process-wide generators of random and torch
instead, so that an image would depend on what was read before it (`augment.py` seeds those where
timm's augmentation is wanted). The arithmetic is theirs; the tests compare pixel by pixel.
"""

import hashlib
import math
import random

import numpy as np
from PIL import Image

SMALL_IMAGE = 64  # pixels; up to this side a crop keeps at least 35 % of the area, else timm's 8 %
CROP_RATIO = (3 / 4, 4 / 3)  # width / height of a random crop
CROP_TRIES = 10


def image_seed(seed: int, epoch: int, index: int, copy: int = 0) -> int:
    """Hash the arguments to the seed of one image in one epoch.

    Args:
        seed: seed of the run.
        epoch: index of the epoch.
        index: index of the image.
        copy: distinguishes the visits of an image in one batch.

    Returns:
        An integer of 64 bits; seeds of neighbouring indices or epochs are unrelated.
    """
    text = f"{seed} {epoch} {index}" + (f" {copy}" if copy else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def crop_scale(size: tuple[int, int]) -> tuple[float, float]:
    """Return the smallest and the largest fraction of an image's area that a random box has."""
    return (0.35 if max(size) <= SMALL_IMAGE else 0.08, 1.0)


def centre_crop(pixels: np.ndarray, size: tuple[int, int], crop_pct: float = 1.0) -> np.ndarray:
    """Resize (bicubic, antialiased) so that the image covers a size, then crop the centre.

    Args:
        pixels: (h, w, C) uint8.
        size: (H, W) of the result in pixels.
        crop_pct: fraction that is kept of the side that is shorter relative to `size`.

    Returns:
        (H, W, C) uint8.
    """
    height, width = pixels.shape[:2]
    if (height, width) == size and crop_pct == 1.0:
        return pixels
    goal_height, goal_width = (math.floor(side / crop_pct) for side in size)
    if goal_height == goal_width:
        shorter = min(height, width)
        height, width = int(goal_height * height / shorter), int(goal_width * width / shorter)
    else:
        ratio = min(height / goal_height, width / goal_width)
        height, width = round(height / ratio), round(width / ratio)
    image = to_pil(pixels).resize((width, height), Image.Resampling.BICUBIC)
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return to_array(image.crop((left, top, left + size[1], top + size[0])), pixels.shape[2])


def random_crop(
    pixels: np.ndarray, size: tuple[int, int], generator: random.Random, flip: bool
) -> np.ndarray:
    """Crop a random box, resize it (bicubic, antialiased), and mirror every second image.

    Random resized crop: Szegedy et al. 2015 (arXiv:1409.4842), as timm draws it.

    Args:
        pixels: (h, w, C) uint8.
        size: (H, W) of the result in pixels.
        generator: random generator seeded by `image_seed`.
        flip: mirror every second image at random; set if that keeps its class.

    Returns:
        (H, W, C) uint8.
    """
    box = random_box(pixels.shape[0], pixels.shape[1], crop_scale(size), generator)
    top, left, height, width = box
    image = to_pil(pixels[top : top + height, left : left + width])
    out = to_array(image.resize((size[1], size[0]), Image.Resampling.BICUBIC), pixels.shape[2])
    return out[:, ::-1] if flip and generator.random() < 0.5 else out


def random_box(
    height: int, width: int, scale: tuple[float, float], generator: random.Random
) -> tuple[int, int, int, int]:
    """Draw a box of random area and ratio.

    If CROP_TRIES boxes in a row do not fit into the image, the result is the largest centred box
    whose ratio of width to height is within CROP_RATIO.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        scale: smallest and largest fraction of the image's area.
        generator: random generator of the image.

    Returns:
        (top, left, height, width) of the box in pixels.
    """
    log_ratio = (math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1]))
    for _ in range(CROP_TRIES):
        area = generator.uniform(*scale) * (height * width)
        ratio = math.exp(generator.uniform(*log_ratio))
        box_width = round(math.sqrt(area * ratio))
        box_height = round(math.sqrt(area / ratio))
        if 1 <= box_width <= width and 1 <= box_height <= height:
            top = generator.randint(0, height - box_height)
            left = generator.randint(0, width - box_width)
            return top, left, box_height, box_width
    box_height, box_width = height, width
    if width / height < CROP_RATIO[0]:
        box_height = max(1, round(width / CROP_RATIO[0]))
    elif width / height > CROP_RATIO[1]:
        box_width = max(1, round(height * CROP_RATIO[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def to_pil(pixels: np.ndarray) -> Image.Image:
    """Convert pixels, (H, W, C) uint8, to a grey (C = 1) or a colour image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def to_array(image: Image.Image, channels: int) -> np.ndarray:
    """Convert a grey or a colour image to pixels, (H, W, C) uint8."""
    return np.asarray(image).reshape(image.height, image.width, channels)
