"""What one rank reads and runs of a job: its batches, and the wide model of sub-networks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.schedule import Loss, Pipeline
from vigpipe.parallel.shards import Shards


class Needs(NamedTuple):
    """Which batches a rank of a replica needs."""

    layout: Layout
    replica_index: int
    device: torch.device
    dtype: torch.dtype  # of the inputs, and of labels that are floating point
    has_first: bool  # whether it has the first stage, which alone needs inputs
    has_last: bool  # whether it has the last stage, which alone needs labels
    shards: Shards | None = None  # the ranks that share its batches; None if it has them alone


class Feed(Protocol):
    """The batches of one rank, which reads only what it needs."""

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
        """Return the batch of a training item, whatever was read before.

        The batch depends on the item's number, counted from 0, and on `progress` where there is
        some. With D replicas, item k is share k % D of step k // D. The items of `ahead` come next,
        as far as is known, and may be read ahead of time. Data that cannot be read is an
        InputError, a worker that has ended, or takes too long, a WorkerError.
        """
        ...

    def test_batches(
        self,
        splits: Sequence[str],
        num_pipelines: int,
        pipeline_index: int,
        most: int | None = None,
    ) -> Iterator[ReplicaBatch]:
        """Yield the share of one of `num_pipelines` pipelines in the samples of some splits.

        They are scored together (`JobScores.passes`). At most the first `most` samples are taken; a
        job that scores samples together, as those of a graph, takes all of them.
        """
        ...

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        """Be told after a step how long the ranks have worked; all of them call this together.

        The times are those of each rank's forwards and backwards, in rank order, in an earlier
        step, whose index is `measured`; `step` is the index of the step that was taken. If the data
        of the next steps follow from the times, a sentence for the user says so.
        """
        ...

    def progress(self) -> dict[str, object]:
        """Return what a later run needs to read the same data from here on, as JSON has it."""
        ...

    def restore(self, progress: Mapping[str, object]) -> None:
        """Read the same data as an earlier run with this progress, or more; or raise ValueError."""
        ...

    def close(self) -> None:
        """End what reads ahead."""
        ...


class Merged(Protocol):
    """The wide model of sub-networks, in evaluations. All replicas call each method together."""

    def take_over(self) -> None:
        """Be told that what the ranks store has changed."""
        ...

    def logits(self, batch: ReplicaBatch) -> Tensor | None:
        """Run the samples of a batch through the model in evaluation mode.

        The batch is this replica's share of one, or has the same samples on all replicas. Only
        ranks of the last stage have logits.
        """
        ...

    def estimate_statistics(
        self, read: Callable[[int], ReplicaBatch], items: Sequence[int]
    ) -> None:
        """Let BatchNorm's running statistics be those of some batches, the same on all replicas.

        They become the exact mean and variance over all of them, each of which is normalised with
        its own, as in training. `read` reads a training item.
        """
        ...


class JobFeed(Protocol):
    """What a job gives a rank to train on."""

    # Whether every replica puts the wide model of sub-networks together for an evaluation, and they
    # share its samples; otherwise each has a part of every layer, and all take every sample
    # through it.
    merges_whole: ClassVar[bool]

    def loss(self, factor: Tensor | None) -> Loss:
        """Return the loss of a micro-batch, which is multiplied by a factor if there is one."""
        ...

    def feed(self, needs: Needs) -> Feed:
        """Return the batches of a rank."""
        ...

    def share_models(self, models: Sequence[StagedModel], shards: Shards) -> None:
        """Let a rank's models take a part of each batch, unless the batch itself tells them."""
        ...

    def merged(self, stages: Sequence[StagedModel], share: WideShare, pipeline: Pipeline) -> Merged:
        """Return a rank's share of the wide model of sub-networks.

        The stages are those of the rank, of the wide model: on the meta device, or if
        `merges_whole` in memory, without values. `share` is what the rank has of them. The pipeline
        is that of the rank's sub-model, or if `merges_whole` one of these stages.
        """
        ...
