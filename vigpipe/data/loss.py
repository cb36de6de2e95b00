"""The loss of a step, taken one micro-batch at a time."""

import torch.nn.functional as F
from torch import Tensor

NO_LABEL = -100  # the label of a row without a sample; torch's cross-entropy ignores it


class Loss:
    """Cross-entropy of one micro-batch as its share of the mean over the step's global batch.

    The shares of all D x M micro-batches add up to the loss of the step, and their gradients to its
    gradient: every sample weighs the same however the batch was cut.

    Attributes:
        num_samples: samples of the step over all replicas; set before each step.
    """

    def __init__(self) -> None:
        self.num_samples = 1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Take one micro-batch.

        Args:
            logits: (rows, num_classes).
            labels: (rows,) int64, NO_LABEL on padding, or (rows, num_classes) probabilities, zeros
                on padding.

        Returns:
            A scalar.
        """
        if labels.is_floating_point():
            total = F.cross_entropy(logits, labels, reduction="sum")
        else:
            total = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
        return total / self.num_samples
