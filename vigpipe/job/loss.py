"""The loss of a step, computed one micro-batch at a time."""

from torch import Tensor


class MeanLoss:
    """The loss of a micro-batch, divided by the number of samples of the whole step.

    Summed over all D x M micro-batches, this is the mean loss of the step, and the same holds for
    the gradients: every sample has the same weight, however the step is cut.

    Args:
        factor: a scalar by which the loss is multiplied, see `run.loss_scale`; None for 1.

    Attributes:
        num_samples: number of samples of the step over all replicas; set before each step.
    """

    def __init__(self, factor: Tensor | None = None) -> None:
        self.num_samples, self.factor = 1, factor

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of a micro-batch's samples."""
        raise NotImplementedError

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the share of one micro-batch in the loss of the step.

        Args:
            logits: (microbatch_size, num_classes).
            labels: what `total` takes, of as many rows.

        Returns:
            A scalar.
        """
        share = self.total(logits, labels) / max(1, self.num_samples)  # a step may have none
        return share if self.factor is None else share * self.factor
