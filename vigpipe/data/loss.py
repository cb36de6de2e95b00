"""The loss of a step, computed one micro-batch at a time."""

import torch.nn.functional as F
from torch import Tensor

NO_LABEL = -100  # the label of a row without a sample; torch's cross-entropy ignores it


class Loss:
    """Cross-entropy of a micro-batch, divided by the number of samples of the global batch.

    Summed over all D x M micro-batches, this is the mean loss of the step, and the same holds for
    the gradients: every sample has the same weight, however the batch is cut.

    Args:
        factor: a scalar by which the loss is multiplied, see `run.loss_scale`; None for 1.

    Attributes:
        num_samples: number of samples of the step over all replicas; set before each step.
    """

    def __init__(self, factor: Tensor | None = None) -> None:
        self.num_samples, self.factor = 1, factor

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the share of one micro-batch in the loss of the step.

        Args:
            logits: (microbatch_size, num_classes).
            labels: (microbatch_size,) int64, NO_LABEL on padding, or (microbatch_size, num_classes)
                probabilities, zeros on padding.

        Returns:
            A scalar.
        """
        if labels.is_floating_point():
            total = F.cross_entropy(logits, labels, reduction="sum")
        else:
            total = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
        share = total / max(1, self.num_samples)  # an item of a partial batch may be empty
        return share if self.factor is None else share * self.factor
