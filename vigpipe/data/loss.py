"""The loss of images."""

import torch.nn.functional as F
from torch import Tensor

from vigpipe.job.loss import MeanLoss
from vigpipe.parallel.batch import NO_LABEL


class Loss(MeanLoss):
    """The mean cross-entropy of the images of a step."""

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Labels are (b,) int64, NO_LABEL on padding; or probabilities, (b, C), zeros on padding.
        weights = self.weights_for(logits)
        if labels.is_floating_point():
            return F.cross_entropy(logits, labels, weights, reduction="sum")
        return F.cross_entropy(logits, labels, weights, ignore_index=NO_LABEL, reduction="sum")
