"""What one replica takes a step with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NO_LABEL = -100  # the class of a row that does not count; torch's cross-entropy ignores it


@dataclass(frozen=True)
class ReplicaBatch:
    """One replica's share of a step, or of an evaluation.

    A row is what a model makes one row of logits of: an image, or a node of a graph. Every
    micro-batch is padded to the same number of rows, because shapes in a pipeline are fixed.
    """

    step: int
    # What the loss is the mean of: the images, or the training nodes, of all replicas that take
    # the step together.
    num_samples: int
    sizes: tuple[int, ...]  # rows of each of the M micro-batches, without padding, which comes last
    # (M * microbatch_size,) int64, what random masks are keyed by; PADDING where there is no row.
    keys: Tensor
    # (M * microbatch_size, ...), on the device, on a rank that has the first stage.
    inputs: Tensor | None
    # On the host, on a rank that has the last stage: (M * b,) int64 classes for the b rows of a
    # micro-batch's logits, NO_LABEL on rows that do not count; or (M * b, num_classes) floating
    # point, of which the job's loss knows the meaning.
    labels: Tensor | None
    # What the model takes besides the rows of each micro-batch, such as the edges of a sub-graph.
    structures: tuple[tuple[Any, ...], ...] = ()
    # Whether the rows, of a single micro-batch of any size, are taken through each layer in turn,
    # some at a time; only in evaluations.
    by_layer: bool = False
    # (M * b,) floating point, where labels are: factors of the losses of the rows; None for 1.
    weights: Tensor | None = None
    # (b,) int64, of NumPy: in evaluations, which of the job's samples the rows are; None for all,
    # in order.
    samples: Any = None
    has_targets: bool = True  # whether a row of this share is one that the loss may count

    @property
    def is_trained(self) -> bool:
        """Whether a step with this share alone may change the weights."""
        return self.num_samples > 0 and self.has_targets

    def without_padding(self, rows: Tensor) -> Tensor:
        """Leave out the padding of (M * microbatch_size, ...); what is left are the samples."""
        microbatch_size = len(rows) // len(self.sizes)
        if min(self.sizes) == microbatch_size:
            return rows
        parts = zip(rows.split(microbatch_size), self.sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])
