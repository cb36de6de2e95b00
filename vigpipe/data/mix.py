"""Mixup and CutMix of a micro-batch with itself, and the labels that go with them.

The random choices depend only on the seed, the step and the index of the micro-batch among all D x
M. So the ranks of the first stage mix the images and those of the last stage make the labels of the
same mixture, without communication.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_STREAM = 0x6D6978  # It separates these draws from others that are seeded by run and step.
SWITCH_PROBABILITY = 0.5  # probability of CutMix if both are on


@dataclass(frozen=True)
class Mixture:
    """How a micro-batch of b samples is mixed; sample i is mixed with sample b - 1 - i."""

    share: float  # weight of a sample's own label in the mixture, 0 ... 1
    # Pixels from the other image, (top, bottom, left, right); None blends whole images.
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class Mix:
    """Mixup (arXiv:1710.09412), CutMix (arXiv:1905.04899) and label smoothing of micro-batches."""

    mixup: float  # alpha of its Beta distribution; 0 turns it off
    cutmix: float  # likewise
    smoothing: float  # probability that is taken from the label and spread evenly over all classes
    num_classes: int
    image_size: tuple[int, int]  # (H, W)
    seed: int

    def draw(self, step: int, microbatch: int) -> Mixture:
        """Decide how a micro-batch, counted among all D x M of the step, is mixed."""
        if self.mixup == self.cutmix == 0:
            return Mixture(1.0)
        generator = np.random.default_rng([self.seed, step, microbatch, _STREAM])
        cut = generator.random() < SWITCH_PROBABILITY if self.mixup and self.cutmix else self.cutmix
        alpha = self.cutmix if cut else self.mixup
        share = float(generator.beta(alpha, alpha))
        if not cut:
            return Mixture(share)
        height, width = self.image_size
        side = math.sqrt(1 - share)
        top, bottom = _span(int(generator.integers(height)), int(height * side), height)
        left, right = _span(int(generator.integers(width)), int(width * side), width)
        # The box may extend beyond the border; only the part inside the image counts.
        share = 1 - (bottom - top) * (right - left) / (height * width)
        return Mixture(share, (top, bottom, left, right))

    def images(self, images: Tensor, mixture: Mixture) -> None:
        """Mix the images of one micro-batch, (b, C, H, W) without padding, in place."""
        if mixture.box is not None:
            top, bottom, left, right = mixture.box
            box = images[..., top:bottom, left:right]
            box.copy_(box.flip(0))
        elif mixture.share != 1:
            other = images.flip(0).mul_(1 - mixture.share)
            images.mul_(mixture.share).add_(other)

    def labels(self, labels: Tensor, mixture: Mixture, dtype: torch.dtype) -> Tensor:
        """Smooth and mix a micro-batch's labels, (b,) int64 without padding: (b, num_classes)."""
        smoothed = F.one_hot(labels, self.num_classes).to(dtype)
        smoothed = smoothed * (1 - self.smoothing) + self.smoothing / self.num_classes
        return smoothed * mixture.share + smoothed.flip(0) * (1 - mixture.share)


def _span(centre: int, length: int, limit: int) -> tuple[int, int]:
    """Clip a line of some length around a centre to 0 ... limit; return both ends."""
    return max(centre - length // 2, 0), min(centre + (length + 1) // 2, limit)
