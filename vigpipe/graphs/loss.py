"""The loss of a sub-graph: that of its training nodes."""

import torch.nn.functional as F
from torch import Tensor

from vigpipe.job.loss import MeanLoss
from vigpipe.parallel.batch import NO_LABEL


class NodeLoss(MeanLoss):
    """The mean loss of the training nodes of a step, or of those that weighted losses stand for."""

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Labels are (b,) int64, for cross-entropy; or (b, C) floats, 1 for each class of a node and
        # 0 for others, for the binary cross-entropies of the classes: their sum over those that
        # are known, divided by the number of all. NO_LABEL does not count.
        if not labels.is_floating_point():
            weights = self.weights_for(logits)
            return F.cross_entropy(logits, labels, weights, ignore_index=NO_LABEL, reduction="sum")
        return self._of_classes(logits, labels).sum() / logits.shape[1]

    def weighted_total(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        if labels.is_floating_point():
            return (self._of_classes(logits, labels).mean(1) * weights).sum()
        of_classes = self.weights_for(logits)
        losses = F.cross_entropy(
            logits, labels, of_classes, ignore_index=NO_LABEL, reduction="none"
        )
        return (losses * weights).sum()

    def _of_classes(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropies, (b, C), 0 where none counts."""
        weights = self.weights_for(logits)
        losses = F.binary_cross_entropy_with_logits(
            logits, labels, reduction="none", pos_weight=weights
        )
        return losses.where(labels != NO_LABEL, 0.0)
