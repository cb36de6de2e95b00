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

from vigpipe.data.loss import NO_LABEL
from vigpipe.data.mix import Mix
from vigpipe.data.reader import Reader
from vigpipe.data.sources import Split
from vigpipe.model.keyed_dropout import PADDING, sample_keys


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
        labels: where this rank has the last stage, else None: (M * rows,) int64, NO_LABEL on
            padding, or (M * rows, num_classes) probabilities, zeros on padding.
    """

    num_samples: int
    keys: Tensor
    images: Tensor | None
    labels: Tensor | None


def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The order in which an epoch visits the samples; it depends on seed and epoch only."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def repeated(order: np.ndarray, batch_size: int, times: int) -> tuple[np.ndarray, np.ndarray]:
    """Let every batch visit fewer images, each several times: repeated augmentation.

    Hoffer et al. 2020 (arXiv:1901.09335). The visits of an image lie as far apart as a batch lets
    them, so that they fall into different micro-batches. Ten images, batches of 6, 2 times:

        [a b c a b c] [d e d e]      copies: [0 0 0 1 1 1] [0 0 1 1]

    Args:
        order: of an epoch; it keeps its length, so its last images are not visited.
        batch_size: B, samples of a full step over all replicas.
        times: visits of an image in a batch.

    Returns:
        The order of the visits, and which visit of its image each one is.
    """
    visits, copies, used = [], [], 0
    for start in range(0, len(order), batch_size):
        size = min(batch_size, len(order) - start)
        different = -(-size // times)
        visits.append(np.tile(order[used : used + different], times)[:size])
        copies.append(np.repeat(np.arange(times), different)[:size])
        used += different
    return np.concatenate(visits), np.concatenate(copies)


def num_steps(num_samples: int, batch_size: int) -> int:
    """Steps that visit every sample once; the last may be smaller."""
    return -(-num_samples // batch_size)


def replica_batches(
    split: Split,
    order: np.ndarray,
    cut: Cut,
    *,
    copies: np.ndarray | None = None,
    mix: Mix | None = None,
    reader: Reader | None = None,
    seed: int = 0,
    first_step: int = 0,
    epoch: int = 0,
    with_images: bool,
    with_labels: bool,
    dtype: torch.dtype = torch.float32,
    pin: bool = False,
) -> Iterator[ReplicaBatch]:
    """Yield one replica's share of every step of an epoch; reads only what this rank needs.

    Args:
        split: the samples.
        order: indices into the split in the order of their visit.
        cut: this replica's share.
        copies: which visit of its image each one is, from `repeated`.
        mix: mixes samples and smooths labels.
        reader: reads the images; by default this process, when they are asked for.
        seed: of the run, for the keys.
        first_step: number of the first step, for the keys.
        epoch: number of the epoch, for the augmentation.
        with_images: read the images (first stage).
        with_labels: read the labels (last stage).
        dtype: of the images, and of labels that are probabilities.
        pin: put the images into pages that a GPU reads by itself, while this process goes on.
    """
    starts = range(0, len(order), cut.batch_size)

    def share(start: int) -> tuple[int, Tensor, np.ndarray]:
        """Samples of the step, this replica's positions, and where they are in the order."""
        num_samples = min(cut.batch_size, len(order) - start)
        positions = cut.positions(num_samples)
        return num_samples, positions, start + positions[positions >= 0].numpy()

    def wanted() -> Iterator[tuple[list[int], list[int] | None]]:
        for start in starts:
            _, _, mine = share(start)
            yield order[mine].tolist(), None if copies is None else copies[mine].tolist()

    pictures = (reader or Reader([split])).read(split, wanted(), epoch) if with_images else None
    for step, start in enumerate(starts, first_step):
        num_samples, positions, mine = share(start)
        real = positions >= 0
        images = labels = None
        if pictures is not None:
            images = _padded(next(pictures).to(dtype), real, 0, pin)
        if with_labels:
            labels = _padded(torch.from_numpy(split.labels[order[mine]]), real, NO_LABEL)
        if mix is not None:
            labels = _mixed(mix, cut, step, real, images, labels, dtype)
        yield ReplicaBatch(num_samples, sample_keys(seed, step, positions), images, labels)


def _mixed(
    mix: Mix,
    cut: Cut,
    step: int,
    real: Tensor,
    images: Tensor | None,
    labels: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Mix the images of every micro-batch in place, and return the labels of the mixture."""
    soft = None if labels is None else torch.zeros(len(labels), mix.num_classes, dtype=dtype)
    for i, count in enumerate(real.view(-1, cut.rows).sum(1).tolist()):
        mixture = mix.draw(step, cut.replica_index * cut.num_microbatches + i)
        rows = slice(i * cut.rows, i * cut.rows + count)
        if images is not None:
            mix.images(images[rows], mixture)
        if soft is not None and labels is not None:
            soft[rows] = mix.labels(labels[rows], mixture, dtype)
    return soft


def _padded(values: Tensor, real: Tensor, fill: int, pin: bool = False) -> Tensor:
    # A fresh tensor even where there is no padding: convolutions choose their way by strides, and
    # those of one-channel images tell two memory formats apart only by chance.
    shape = (len(real), *values.shape[1:])
    padded = torch.full(shape, fill, dtype=values.dtype, pin_memory=pin)
    padded[real] = values
    return padded
