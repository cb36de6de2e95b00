"""The loss of a step, computed one micro-batch at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor


class MeanLoss:
    """The loss of a micro-batch, divided by the number of samples of the whole step.

    Summed over all D x M micro-batches, this is the mean loss of the step, and the same holds for
    the gradients: every sample has the same weight, or that of its class, however the step is cut.
    With a factor, a scalar, the loss is multiplied by it (`run.loss_scale`).
    """

    def __init__(self, factor: Tensor | None = None, class_weights: Tensor | None = None) -> None:
        self.factor, self._class_weights = factor, class_weights
        self.begin(1)

    def weights_for(self, logits: Tensor) -> Tensor | None:
        """Return the weights of the classes, (num_classes,), as logits are; None for none."""
        if self._class_weights is not None:
            self._class_weights = self._class_weights.to(logits)
        return self._class_weights

    def begin(self, num_samples: int, weights: Sequence[Tensor] = ()) -> None:
        """Prepare for the micro-batches of a step, which come in order.

        The loss is divided by `num_samples`, those of the step over all replicas. The losses of
        each micro-batch's samples are multiplied by its weights, (microbatch_size,), if any.
        """
        self.num_samples, self._weights = num_samples, iter(weights)

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of a micro-batch's samples."""
        raise NotImplementedError

    def weighted_total(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the losses of a micro-batch's samples times their weights."""
        raise NotImplementedError

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute a micro-batch's share in the loss of the step, from (b, num_classes) logits.

        Of a model with two heads, (b, num_classes, 2), it is the mean of both losses.
        """
        weights = next(self._weights, None)
        heads = [logits] if logits.dim() == 2 else logits.unbind(-1)
        totals = [
            self.total(head, labels)
            if weights is None
            else self.weighted_total(head, labels, weights)
            for head in heads
        ]
        total = totals[0] if len(totals) == 1 else torch.stack(totals).mean()
        share = total / max(1, self.num_samples)  # a step may have none
        return share if self.factor is None else share * self.factor
