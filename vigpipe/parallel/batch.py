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

    Attributes:
        step: index of the step.
        num_samples: what the loss is the mean of: the images, or the training nodes, of all
            replicas that take the step together.
        sizes: number of rows in each of this replica's M micro-batches; padding, which comes last
            in a micro-batch, is not counted.
        keys: (M * microbatch_size,) int64, what random masks are keyed by; PADDING where there is
            no row.
        inputs: (M * microbatch_size, ...), what the first stage takes, on the rank's device where
            it has that stage, else None.
        labels: on the host where this rank has the last stage, else None: (M * b,) int64 classes
            for the b rows of a micro-batch's logits, NO_LABEL on rows that do not count; or
            (M * b, num_classes) floating point, of which the job's loss knows the meaning.
        structures: what the model takes besides the rows of each micro-batch, a tuple of arguments,
            such as the edges of a sub-graph; empty for models that take nothing else.
        by_layer: whether the rows, of a single micro-batch of any size, are taken through each
            layer in turn, some at a time; only in evaluations.
        weights: where labels are, (M * b,) floating point, what the losses of the rows are
            multiplied by; None for 1.
        samples: in evaluations, which of the job's samples the rows are; None for all, in order.
    """

    step: int
    num_samples: int
    sizes: tuple[int, ...]
    keys: Tensor
    inputs: Tensor | None
    labels: Tensor | None
    structures: tuple[tuple[Any, ...], ...] = ()
    by_layer: bool = False
    weights: Tensor | None = None
    samples: Any = None  # (b,) int64, of NumPy

    def without_padding(self, rows: Tensor) -> Tensor:
        """Leave out the padding of (M * microbatch_size, ...); what is left are the samples."""
        microbatch_size = len(rows) // len(self.sizes)
        if min(self.sizes) == microbatch_size:
            return rows
        parts = zip(rows.split(microbatch_size), self.sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])
