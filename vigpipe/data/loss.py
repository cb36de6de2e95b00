"""The loss of images."""

import torch.nn.functional as F
from torch import Tensor

from vigpipe.job.loss import MeanLoss
from vigpipe.parallel.batch import NO_LABEL


class Loss(MeanLoss):
    """The mean cross-entropy of the images of a step."""

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Labels are (b,) int64, NO_LABEL on padding; or probabilities, (b, C), zeros on padding.
        if labels.is_floating_point():
            return F.cross_entropy(logits, labels, reduction="sum")
        return F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
