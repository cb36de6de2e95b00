"""The order of an epoch's samples, and each replica's padded micro-batches of every step.

A step's samples are cut, in order, into D x M micro-batches whose sizes differ by at most one;
replica r takes micro-batches r*M ... r*M + M - 1. Ten samples on 2 replicas x 2 micro-batches:

    replica 0: [0 1 2] [3 4 5]      replica 1: [6 7 -] [8 9 -]

Shapes in a pipeline are fixed, so every micro-batch is padded to the size of the largest one.
Padding (-) carries no label, and the stages drop it before they compute.
"""

from collections.abc import Iterator, Sequence
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
class Share:
    """One replica's share of a step's samples, and how it is cut into micro-batches.

    Attributes:
        batch_size: B, samples of a full step over all replicas.
        num_microbatches: M, micro-batches of each replica.
        num_replicas: D.
        replica_index: index of the replica.
    """

    batch_size: int
    num_microbatches: int
    num_replicas: int = 1
    replica_index: int = 0

    @property
    def microbatch_size(self) -> int:
        """Samples of a micro-batch, padding included."""
        return -(-self.batch_size // (self.num_microbatches * self.num_replicas))

    def positions(self, num_samples: int) -> Tensor:
        """Positions of this replica's samples in the global batch, PADDING where there is none.

        Args:
            num_samples: samples of the step over all replicas, at most B.

        Returns:
            (M * microbatch_size,) int64.
        """
        smallest, larger = divmod(num_samples, self.num_microbatches * self.num_replicas)
        positions = torch.full((self.num_microbatches, self.microbatch_size), PADDING)
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
        sizes: number of this replica's samples in each of its M micro-batches; padding, which comes
            last in a micro-batch, is not counted.
        keys: (M * microbatch_size,) int64, what random masks are keyed by; PADDING where there is
            no sample.
        images: (M * microbatch_size, C, H, W) where this rank has the first stage, else None.
        labels: where this rank has the last stage, else None: (M * microbatch_size,) int64,
            NO_LABEL on padding, or (M * microbatch_size, num_classes) probabilities, zeros on
            padding.
    """

    num_samples: int
    sizes: tuple[int, ...]
    keys: Tensor
    images: Tensor | None
    labels: Tensor | None

    def without_padding(self, rows: Tensor) -> Tensor:
        """Leave out the padding of (M * microbatch_size, ...); what is left are the samples."""
        microbatch_size = len(rows) // len(self.sizes)
        if min(self.sizes) == microbatch_size:
            return rows
        parts = zip(rows.split(microbatch_size), self.sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])


def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """Draw the order in which an epoch visits the samples.

    Args:
        seed: seed of the run.
        epoch: index of the epoch.
        num_samples: n.

    Returns:
        A permutation of 0 ... n - 1, (n,) int64, which depends only on the arguments.
    """
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def repeated(order: np.ndarray, batch_size: int, times: int) -> tuple[np.ndarray, np.ndarray]:
    """Let every batch visit fewer images, each several times: repeated augmentation.

    Hoffer et al. 2020 (arXiv:1901.09335). The visits of an image are as far apart as possible
    within the batch, so that they fall into different micro-batches. Ten images in batches of 6,
    each visited 2 times:

        [a b c a b c] [d e d e]      copies: [0 0 0 1 1 1] [0 0 1 1]

    Args:
        order: order of an epoch from `epoch_order`, (n,). The result has the same length, so the
            last images are not visited.
        batch_size: B, samples of a full step over all replicas.
        times: how often an image is visited in a batch.

    Returns:
        The indices of the visited images, (n,), and for each visit how many visits of that image
        came before it in the batch, (n,).
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
    """Return the number of steps that visit every sample once; the last step may be smaller."""
    return -(-num_samples // batch_size)


def replica_batches(
    split: Split,
    order: np.ndarray,
    share: Share,
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
    """Yield one replica's share of every step of an epoch; read only what this rank needs.

    Args:
        split: the samples.
        order: indices into the split, in the order in which they are visited.
        share: how the samples are cut, and which of them are this replica's.
        copies: the second result of `repeated`; by default every image is visited once.
        mix: mixes samples and smooths labels; None for neither.
        reader: reads the images; by default this process reads each batch when it is due.
        seed: seed of the run, for the keys.
        first_step: index of the first step, for the keys.
        epoch: index of the epoch, for the augmentation.
        with_images: read the images (first stage).
        with_labels: read the labels (last stage).
        dtype: type of the images, and of labels that are probabilities.
        pin: put the images into pinned memory, from which a GPU copies without this process.

    Yields:
        One ReplicaBatch per step.
    """
    starts = range(0, len(order), share.batch_size)

    def taken(start: int) -> tuple[int, Tensor, np.ndarray]:
        """Return the step's number of samples, this replica's positions, and their visits."""
        num_samples = min(share.batch_size, len(order) - start)
        positions = share.positions(num_samples)
        return num_samples, positions, start + positions[positions >= 0].numpy()

    def requests() -> Iterator[tuple[list[int], list[int] | None]]:
        for start in starts:
            _, _, visits = taken(start)
            yield order[visits].tolist(), None if copies is None else copies[visits].tolist()

    reads = (reader or Reader([split])).read(split, requests(), epoch) if with_images else None
    for step, start in enumerate(starts, first_step):
        num_samples, positions, visits = taken(start)
        real = positions >= 0
        sizes = tuple(real.view(-1, share.microbatch_size).sum(1).tolist())
        images = labels = None
        if reads is not None:
            images = _padded(next(reads).to(dtype), real, 0, pin)
        if with_labels:
            labels = _padded(torch.from_numpy(split.labels[order[visits]]), real, NO_LABEL)
        if mix is not None:
            labels = _mixed(mix, share, step, sizes, images, labels, dtype)
        yield ReplicaBatch(num_samples, sizes, sample_keys(seed, step, positions), images, labels)


def _mixed(
    mix: Mix,
    share: Share,
    step: int,
    sizes: Sequence[int],
    images: Tensor | None,
    labels: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Mix the images of every micro-batch in place, and return the labels of the mixture."""
    soft = None if labels is None else torch.zeros(len(labels), mix.num_classes, dtype=dtype)
    for i, count in enumerate(sizes):
        mixture = mix.draw(step, share.replica_index * share.num_microbatches + i)
        start = i * share.microbatch_size
        samples = slice(start, start + count)
        if images is not None:
            mix.images(images[samples], mixture)
        if soft is not None and labels is not None:
            soft[samples] = mix.labels(labels[samples], mixture, dtype)
    return soft


def _padded(values: Tensor, real: Tensor, fill: int, pin: bool = False) -> Tensor:
    # Makes a new tensor even without padding: convolutions choose their algorithm by the strides,
    # and for one-channel images the strides do not determine the memory format.
    shape = (len(real), *values.shape[1:])
    padded = torch.full(shape, fill, dtype=values.dtype, pin_memory=pin)
    padded[real] = values
    return padded
