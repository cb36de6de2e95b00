"""Who reads which sample: the order of an epoch, and each replica's padded micro-batches.

A step's samples are cut, in order, into D x M micro-batches whose sizes differ by at most one;
replica r takes micro-batches r*M ... r*M + M - 1. Ten samples on 2 replicas x 2 micro-batches:

    replica 0: [0 1 2] [3 4 5]      replica 1: [6 7 -] [8 9 -]

Shapes in a pipeline are fixed, so every micro-batch has the rows of the largest one; rows without a
sample (-) are padding: they carry no label, and the stages drop them before they compute.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vigpipe.data.sources import Split
from vigpipe.loss import NO_LABEL
from vigpipe.model.noise import PADDING, sample_keys


@dataclass(frozen=True)
class Cut:
    """The cut of a step's samples for one replica.

    Attributes:
        batch_size: B, samples of a full step over all replicas.
        num_microbatches: M, of each replica.
        num_replicas: D.
        replica_index: whose share this is.
    """

    batch_size: int
    num_microbatches: int
    num_replicas: int = 1
    replica_index: int = 0

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, padding included."""
        return -(-self.batch_size // (self.num_microbatches * self.num_replicas))

    def positions(self, num_samples: int) -> Tensor:
        """This replica's rows as positions in the global batch: (M * rows,) int64, or PADDING."""
        smallest, larger = divmod(num_samples, self.num_microbatches * self.num_replicas)
        positions = torch.full((self.num_microbatches, self.rows), PADDING)
        for i in range(self.num_microbatches):
            j = self.replica_index * self.num_microbatches + i
            start, size = j * smallest + min(j, larger), smallest + (j < larger)
            positions[i, :size] = torch.arange(start, start + size)
        return positions.flatten()


@dataclass(frozen=True)
class ReplicaBatch:
    """One replica's share of a step.

    Attributes:
        num_samples: samples of the whole step, over all replicas.
        keys: (M * rows,) int64, what random masks are keyed by; PADDING marks rows without a
            sample.
        images: (M * rows, C, H, W) where this rank has the first stage, else None.
        labels: (M * rows,) int64, NO_LABEL on padding, where this rank has the last stage, else
            None.
    """

    num_samples: int
    keys: Tensor
    images: Tensor | None
    labels: Tensor | None


def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The order in which an epoch visits the samples; it depends on seed and epoch only."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def num_steps(num_samples: int, batch_size: int) -> int:
    """Steps that visit every sample once; the last may be smaller."""
    return -(-num_samples // batch_size)


def replica_batches(
    split: Split,
    order: np.ndarray,
    cut: Cut,
    *,
    seed: int = 0,
    first_step: int = 0,
    epoch: int = 0,
    with_images: bool,
    with_labels: bool,
    dtype: torch.dtype = torch.float32,
) -> Iterator[ReplicaBatch]:
    """Yield one replica's share of every step of an epoch; reads only what this rank needs.

    Args:
        split: the samples.
        order: indices into the split in the order of their visit.
        cut: this replica's share.
        seed: of the run, for the keys.
        first_step: number of the first step, for the keys.
        epoch: number of the epoch, for the augmentation.
        with_images: read the images (first stage).
        with_labels: read the labels (last stage).
        dtype: of the images.
    """
    for i, start in enumerate(range(0, len(order), cut.batch_size)):
        indices = order[start : start + cut.batch_size]
        positions = cut.positions(len(indices))
        real = positions >= 0
        mine = indices[positions[real].numpy()]
        images = labels = None
        if with_images:
            images = _padded(split.read(mine.tolist(), epoch).to(dtype), real, 0)
        if with_labels:
            labels = _padded(torch.from_numpy(split.labels[mine]), real, NO_LABEL)
        yield ReplicaBatch(
            len(indices), sample_keys(seed, first_step + i, positions), images, labels
        )


def _padded(values: Tensor, real: Tensor, fill: int) -> Tensor:
    # A fresh tensor even where there is no padding: convolutions choose their way by strides, and
    # those of one-channel images tell two memory formats apart only by chance.
    padded = torch.full((len(real), *values.shape[1:]), fill, dtype=values.dtype)
    padded[real] = values
    return padded
