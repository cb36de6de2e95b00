"""Mixup and CutMix of a micro-batch with itself, and the labels that go with them.

What is drawn depends on (seed, step, number of the micro-batch among all D x M) only. So the ranks
of the first stage mix the images, and those of the last make the labels of the same mixture,
without a word between them.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_STREAM = 0x6D6978  # keeps the draws apart from others that are seeded by run and step
SWITCH_PROBABILITY = 0.5  # of CutMix where both are on


@dataclass(frozen=True)
class Mixture:
    """How a micro-batch is mixed; sample i meets sample b - 1 - i.

    Attributes:
        share: what a sample keeps of its own label, 0 ... 1.
        box: (top, bottom, left, right) that comes from the other image; None blends whole images.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class Mix:
    """What happens to the samples of a micro-batch between reading and the model.

    Mixup: Zhang et al. 2018 (arXiv:1710.09412). CutMix: Yun et al. 2019 (arXiv:1905.04899).

    Attributes:
        mixup: alpha of mixup's Beta distribution; 0 turns it off.
        cutmix: alpha of CutMix's; 0 turns it off.
        smoothing: probability that a label spreads evenly over all classes.
        num_classes: width of the labels.
        image_size: (H, W).
        seed: of the run.
    """

    mixup: float
    cutmix: float
    smoothing: float
    num_classes: int
    image_size: tuple[int, int]
    seed: int

    def draw(self, step: int, microbatch: int) -> Mixture:
        """Decide one micro-batch.

        Args:
            step: number of the optimizer step.
            microbatch: number of the micro-batch among all D x M of the step.
        """
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
        # The box may reach over the border; what counts is what is seen of it.
        share = 1 - (bottom - top) * (right - left) / (height * width)
        return Mixture(share, (top, bottom, left, right))

    def images(self, images: Tensor, mixture: Mixture) -> None:
        """Mix (b, C, H, W) in place; all b are samples."""
        if mixture.box is not None:
            top, bottom, left, right = mixture.box
            box = images[..., top:bottom, left:right]
            box.copy_(box.flip(0))
        elif mixture.share != 1:
            other = images.flip(0).mul_(1 - mixture.share)
            images.mul_(mixture.share).add_(other)

    def labels(self, labels: Tensor, mixture: Mixture, dtype: torch.dtype) -> Tensor:
        """(b,) int64 -> (b, num_classes) probabilities."""
        own = F.one_hot(labels, self.num_classes).to(dtype)
        own = own * (1 - self.smoothing) + self.smoothing / self.num_classes
        return own * mixture.share + own.flip(0) * (1 - mixture.share)


def _span(centre: int, length: int, limit: int) -> tuple[int, int]:
    """Where a line of that length around the centre begins and ends within 0 ... limit."""
    return max(centre - length // 2, 0), min(centre + (length + 1) // 2, limit)
