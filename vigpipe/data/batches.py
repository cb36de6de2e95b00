"""Which samples each step visits, and which of them are in each replica's micro-batches.

A step's samples are cut, in order, into D x M micro-batches whose sizes differ by at most one;
replica r takes micro-batches r*M ... r*M + M - 1. Ten samples on 2 replicas x 2 micro-batches:

    replica 0: [0 1 2] [3 4 5]      replica 1: [6 7 -] [8 9 -]

Shapes in a pipeline are fixed, so every micro-batch is padded to the size of the largest one.
Padding (-) carries no label, and the stages drop it before they compute.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vigpipe.job.order import epoch_order
from vigpipe.model.keyed_dropout import PADDING


@dataclass(frozen=True)
class Share:
    """One replica's share of a step's samples, and how it is cut into micro-batches."""

    batch_size: int  # B, samples of a full step over all replicas
    num_microbatches: int  # M, of each replica
    num_replicas: int = 1  # D
    replica_index: int = 0

    @property
    def microbatch_size(self) -> int:
        """Samples of a micro-batch, padding included."""
        return -(-self.batch_size // (self.num_microbatches * self.num_replicas))

    def among(self, num_pipelines: int, pipeline_index: int = 0) -> "Share":
        """Return a pipeline's share of an evaluation, whose batches so many pipelines share."""
        if num_pipelines == self.num_replicas:
            return replace(self, replica_index=pipeline_index)
        # A batch has as many samples as full micro-batches hold.
        size = self.microbatch_size * self.num_microbatches * num_pipelines
        return Share(size, self.num_microbatches, num_pipelines, pipeline_index)

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Samples of each micro-batch, without padding; the step has so many over all replicas."""
        smallest, num_larger = divmod(num_samples, self.num_microbatches * self.num_replicas)
        first = self.replica_index * self.num_microbatches
        return tuple(smallest + (first + i < num_larger) for i in range(self.num_microbatches))

    def of_team(self, num_samples: int, team_size: int) -> int:
        """Samples of a step that this replica takes together with the others of its team."""
        first = self.replica_index // team_size * team_size
        team = (replace(self, replica_index=first + i) for i in range(team_size))
        return sum(sum(share.sizes(num_samples)) for share in team)

    def positions(self, num_samples: int) -> Tensor:
        """Positions of samples in the global batch, or PADDING: (M * microbatch_size,) int64."""
        smallest, num_larger = divmod(num_samples, self.num_microbatches * self.num_replicas)
        first = self.replica_index * self.num_microbatches
        start = first * smallest + min(first, num_larger)
        positions = torch.full((self.num_microbatches, self.microbatch_size), PADDING)
        for microbatch, size in zip(positions, self.sizes(num_samples), strict=True):
            microbatch[:size] = torch.arange(start, start + size)
            start += size
        return positions.flatten()


def repeated(order: np.ndarray, batch_size: int, times: int) -> tuple[np.ndarray, np.ndarray]:
    """Let every batch visit fewer images, each several times: repeated augmentation.

    Hoffer et al. 2020 (arXiv:1901.09335). The visits of an image are as far apart as possible
    within the batch, so that they fall into different micro-batches. Ten images in batches of 6,
    each visited 2 times:

        [a b c a b c] [d e d e]      copies: [0 0 0 1 1 1] [0 0 1 1]

    Returns the indices of the visited images, as many as the order of the epoch has, (n,), so that
    the last images are not visited; and how many visits of its image came before each in its batch.
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


class Visits(NamedTuple):
    """The images that a step visits."""

    indices: np.ndarray  # in the split, (b,), in the order in which they are visited
    epoch: int = 0  # counted from 1; 0 outside of training
    copies: np.ndarray | None = None  # (b,), visits of that image before in the step; None for none

    def at(self, positions: np.ndarray | slice) -> "Visits":
        copies = None if self.copies is None else self.copies[positions]
        return Visits(self.indices[positions], self.epoch, copies)


class TrainingOrder:
    """The images that each step visits: all of an epoch in a new order, or fewer, `repeated`."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, times: int = 1) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size
        self._seed, self._times = seed, times
        self._steps_per_epoch = num_steps(num_samples, batch_size)
        self._visits = Visits(np.empty(0, dtype=np.int64))  # of the epoch that was asked for last

    def __call__(self, step: int) -> Visits:
        num_before, step_of_epoch = divmod(step, self._steps_per_epoch)
        epoch = num_before + 1
        if epoch != self._visits.epoch:
            order, copies = epoch_order(self._seed, epoch, self._num_samples), None
            if self._times > 1:
                order, copies = repeated(order, self._batch_size, self._times)
            self._visits = Visits(order, epoch, copies)
        first = step_of_epoch * self._batch_size
        return self._visits.at(slice(first, first + self._batch_size))


def plain_order(num_samples: int, batch_size: int) -> list[Visits]:
    """Return what each batch visits when all images are visited once, from first to last."""
    order = np.arange(num_samples)
    return [Visits(order[i : i + batch_size]) for i in range(0, num_samples, batch_size)]
