"""The loss of a sub-graph: that of its training nodes."""

import torch.nn.functional as F
from torch import Tensor

from vigpipe.job.batch import NO_LABEL
from vigpipe.job.loss import MeanLoss


class NodeLoss(MeanLoss):
    """The mean loss of the training nodes of a step."""

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of a sub-graph's training nodes.

        Args:
            logits: (microbatch_size, C).
            labels: (microbatch_size,) int64 classes, for cross-entropy, NO_LABEL on rows that do
                not count; or (microbatch_size, C) floating point, 1 for each class of a node and 0
                for others, for the binary cross-entropy, which is the mean over classes; NO_LABEL
                on rows that do not count.
        """
        if not labels.is_floating_point():
            return F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
        counts = labels != NO_LABEL
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return losses.where(counts, 0.0).sum() / logits.shape[1]
