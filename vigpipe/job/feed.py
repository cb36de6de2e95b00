"""What one rank reads and runs of a job: its batches, and the wide model of sub-networks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.schedule import Loss, Pipeline
from vigpipe.parallel.shards import Shards


class Feed(Protocol):
    """The batches of one rank, which reads only what it needs."""

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
        """Return the batch of a training item, whatever was read before.

        Args:
            item: number of the item, from 0; the batch depends on nothing else, but on `progress`
                where there is some. With D replicas, item k is share k % D of step k // D.
            ahead: the items after this one, as far as they are known, which may be read ahead of
                time.

        Raises:
            InputError: data cannot be read.
            WorkerError: a worker has ended, or takes too long.
        """
        ...

    def test_batches(
        self, splits: Sequence[str], num_pipelines: int, place: int, most: int | None = None
    ) -> Iterator[ReplicaBatch]:
        """Yield this pipeline's share of the samples of some splits.

        Args:
            splits: names of splits that are scored together, see `JobScores.passes`.
            num_pipelines: how many pipelines share the evaluation.
            place: which of these this one is.
            most: number of samples, from the first; None for all. A job that scores samples
                together, as those of a graph, scores them all.
        """
        ...

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        """Be told after a step how long the ranks have worked; all of them call this together.

        Args:
            step: index of the step that was taken.
            measured: index of the step that the times are of, an earlier one.
            busy_seconds: time of each rank's forwards and backwards in it, in rank order.

        Returns:
            A sentence for the user if the data of the next steps follow from the times.
        """
        ...

    def progress(self) -> dict[str, object]:
        """Return what a later run needs to read the same data from here on, as JSON has it."""
        ...

    def restore(self, progress: Mapping[str, object]) -> None:
        """Read the same data as an earlier run.

        Args:
            progress: what its feed has returned, and perhaps more.

        Raises:
            ValueError: it is malformed.
        """
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

        Args:
            batch: this replica's share of a batch, or the same samples on all replicas.

        Returns:
            Their logits, on ranks of the last stage; else None.
        """
        ...

    def estimate_statistics(
        self, read: Callable[[int], ReplicaBatch], items: Sequence[int]
    ) -> None:
        """Let BatchNorm's running statistics be those of some batches.

        They become the exact mean and variance over all of them, each of which is normalised with
        its own, as in training.

        Args:
            read: reads an item of the training.
            items: the items, the same ones on all replicas.
        """
        ...


class JobFeed(Protocol):
    """What a job gives a rank to train on.

    Attributes:
        merges_whole: whether every replica puts the wide model of sub-networks together for an
            evaluation, and they share its samples; otherwise each has a part of every layer, and
            all take every sample through it.
    """

    merges_whole: ClassVar[bool]

    def loss(self, factor: Tensor | None) -> Loss:
        """Return the loss of a micro-batch, which is multiplied by a factor if there is one."""
        ...

    def feed(
        self,
        layout: Layout,
        replica_index: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_first: bool,
        has_last: bool,
        shards: Shards | None = None,
    ) -> Feed:
        """Return the batches of a rank.

        Args:
            layout: the degrees.
            replica_index: the replica of the rank.
            device: where it computes.
            dtype: of the inputs, and of labels that are floating point.
            has_first: whether it has the first stage, and so needs inputs.
            has_last: whether it has the last stage, and so needs labels.
            shards: the ranks that share the batches of the replica; None if this one has them for
                itself.
        """
        ...

    def share_models(self, models: Sequence[StagedModel], shards: Shards) -> None:
        """Let a rank's models take a part of each batch, where they do not learn it from the batch.

        Args:
            models: those of the rank.
            shards: the ranks that share the batches of its replica, at least two.
        """
        ...

    def merged(self, stages: Sequence[StagedModel], share: WideShare, pipeline: Pipeline) -> Merged:
        """Return a rank's share of the wide model of sub-networks.

        Args:
            stages: those of the rank, of the wide model: on the meta device, or if `merges_whole`
                in memory, without values.
            share: what the rank has of them.
            pipeline: that of the rank's sub-model, or if `merges_whole` one of these stages.
        """
        ...
