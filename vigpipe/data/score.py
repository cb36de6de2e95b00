"""The score of a model on images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vigpipe.job.score import Score
from vigpipe.launch.device import send
from vigpipe.parallel.batch import NO_LABEL, ReplicaBatch

NUM_TOP = 5  # classes, one of which is to be right


def tells_top5(num_classes: int) -> bool:
    """Whether being among the five likeliest of so many classes means something."""
    return num_classes > NUM_TOP


@dataclass(frozen=True)
class ImageScore(Score):
    """The score of a model on the images of a split."""

    main_name: ClassVar[str] = "top1"
    unit: ClassVar[str] = "images"

    loss: float  # pyrefly: ignore[bad-override]  # mean cross-entropy
    top1: float  # fraction of the images whose class is the likeliest
    top5: float  # or one of the five likeliest
    num_samples: int  # pyrefly: ignore[bad-override]
    untold: tuple[str, ...] = ()  # pyrefly: ignore[bad-override]


class ImageTally:
    """Adds up what the score of a single split is made of."""

    def __init__(self, splits: Sequence[str], device: torch.device, num_classes: int) -> None:
        (self._split,) = splits
        self._device = device
        # Loss, hits of the most likely class and of the five, and images.
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._num_classes = num_classes

    def add(self, batch: ReplicaBatch, logits: Tensor) -> None:
        assert batch.labels is not None
        logits = batch.without_padding(logits)
        labels = send(batch.without_padding(batch.labels), self._device)
        self.sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        is_right = logits.topk(min(NUM_TOP, logits.shape[1])).indices == labels[:, None]  # (b, 5)
        self.sums[1] += is_right[:, 0].sum()
        self.sums[2] += is_right.any(1).sum()
        self.sums[3] += (labels != NO_LABEL).sum()

    def scores(self, sums: list[float]) -> dict[str, ImageScore]:
        loss, top1, top5, images = sums
        untold = () if tells_top5(self._num_classes) else ("top5",)
        score = ImageScore(loss / images, top1 / images, top5 / images, int(images), untold)
        return {self._split: score}
