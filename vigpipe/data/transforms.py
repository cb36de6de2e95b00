"""Bring an image to the model's size: centred for evaluation, cropped at random for training.

The random choices of each image come from its own generator, seeded by seed, epoch, index and copy:
timm and torchvision draw from the process-wide ones, so that an image would depend on what was read
before it (`augment.py`). The arithmetic is theirs; the tests compare pixel by pixel.
"""

import hashlib
import math
import random

from PIL import Image

from vigpipe.data.picture import Picture, size_of, to_pil

SMALL_IMAGE = 64  # pixels; up to this side a crop keeps at least 35 % of the area, else timm's 8 %
CROP_RATIO = (3 / 4, 4 / 3)  # width / height of a random crop
CROP_TRIES = 10


def image_seed(seed: int, epoch: int, index: int, copy: int = 0) -> int:
    """Hash the arguments to 64 bits; seeds of neighbouring indices or epochs are unrelated."""
    return hash_64(f"{seed} {epoch} {index}" + (f" {copy}" if copy else ""))


def hash_64(text: str) -> int:
    """Hash a text to 64 bits, alike in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def crop_scale(size: tuple[int, int]) -> tuple[float, float]:
    """Return the smallest and the largest fraction of an image's area that a random box has."""
    return (0.35 if max(size) <= SMALL_IMAGE else 0.08, 1.0)


def centre_crop(picture: Picture, size: tuple[int, int], crop_pct: float = 1.0) -> Picture:
    """Resize (bicubic, antialiased) so that the image covers a size (H, W), then crop the centre.

    The fraction `crop_pct` is kept of the side that is shorter relative to the size.
    """
    height, width = size_of(picture)
    if (height, width) == size and crop_pct == 1.0:
        return picture
    goal_height, goal_width = (math.floor(side / crop_pct) for side in size)
    if goal_height == goal_width:
        shorter = min(height, width)
        height, width = int(goal_height * height / shorter), int(goal_width * width / shorter)
    else:
        ratio = min(height / goal_height, width / goal_width)
        height, width = round(height / ratio), round(width / ratio)
    image = to_pil(picture).resize((width, height), Image.Resampling.BICUBIC)
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return image.crop((left, top, left + size[1], top + size[0]))


def random_crop(
    picture: Picture, size: tuple[int, int], generator: random.Random, flip: bool
) -> Image.Image:
    """Crop a random box, resize it, perhaps mirror it: Szegedy et al. 2015 (arXiv:1409.4842)."""
    top, left, height, width = random_box(*size_of(picture), crop_scale(size), generator)
    image = to_pil(picture).crop((left, top, left + width, top + height))
    image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    mirror = flip and generator.random() < 0.5
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image


def random_box(
    height: int, width: int, scale: tuple[float, float], generator: random.Random
) -> tuple[int, int, int, int]:
    """Draw a box of random area and ratio, as timm does: (top, left, height, width) in pixels."""
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
    # None of them has fitted: take the largest centred box whose ratio is within CROP_RATIO.
    box_height, box_width = height, width
    if width / height < CROP_RATIO[0]:
        box_height = max(1, round(width / CROP_RATIO[0]))
    elif width / height > CROP_RATIO[1]:
        box_width = max(1, round(height * CROP_RATIO[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width
