"""What a run asks of its job: what is trained on, and what of it one rank reads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from vigpipe.config.options import TrainConfig
from vigpipe.job.batch import ReplicaBatch
from vigpipe.job.fill import Fill
from vigpipe.job.score import Tally
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.slicing import Slicing
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan
from vigpipe.parallel.schedule import Loss, Pipeline
from vigpipe.parallel.shards import Shards
from vigpipe.planning.profile import Amounts


class TrialStep(NamedTuple):
    """A step of one process, which is timed.

    Attributes:
        config: options of the process.
        num_microbatches: M.
        item: that the step is taken with.
        size: what the costs of one of its micro-batches follow from, by name, such as its nodes and
            its edges; its rows first.
    """

    config: TrainConfig
    num_microbatches: int
    item: int
    size: Mapping[str, int]


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
            splits: names of splits that are scored together, see `Job.passes`.
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


class Job(Protocol):
    """What a run trains on, and with which model; the same on every rank.

    Attributes:
        unit: what the samples are: images or nodes.
        merges_whole: whether every replica puts the wide model of sub-networks together for an
            evaluation, and they share its samples; otherwise each has a part of every layer, and
            all take every sample through it.
    """

    unit: ClassVar[str]
    merges_whole: ClassVar[bool]

    @property
    def config(self) -> TrainConfig:
        """All options, also those that the data decide."""
        ...

    @property
    def name(self) -> str:
        """What the user calls the data."""
        ...

    def with_options(self, config: TrainConfig) -> Self:
        """Return the same job with other options, which ask for the same data and model."""
        ...

    @property
    def passes(self) -> tuple[tuple[str, ...], ...]:
        """The splits that can be scored; those of one inner tuple are scored together."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that the user should read before the run."""
        ...

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of the inputs: (C, H, W) of an image, or (features,) of a node."""
        ...

    def make_model(self, num_parts: int = 1) -> StagedModel:
        """Make the unsplit model, with weights from torch's generator, on torch's device.

        Args:
            num_parts: make one of so many sub-models, which share the model's channels.

        It may warn (`vigpipe.model.blocks.FewNodesWarning`); a run tells the user so once.
        """
        ...

    def check(self, layout: Layout, model: StagedModel, plan: Plan) -> None:
        """Raise InputError if the data or the model cannot be cut as the layout asks for.

        Args:
            layout: the degrees.
            model: the unsplit model, on the meta device.
            plan: which of its blocks goes to which stage.
        """
        ...

    def batch_size(self, layout: Layout) -> int:
        """Return B, the rows of a full step over all replicas."""
        ...

    def microbatch_size(self, layout: Layout) -> int:
        """Return the rows of a micro-batch, padding included."""
        ...

    def rows_before(self, layout: Layout, block: int) -> int:
        """Return the rows of a micro-batch that reach a block, padding included.

        Args:
            layout: the degrees.
            block: its index; the number of blocks for what comes after the last one.
        """
        ...

    def most_microbatches(self, layout: Layout) -> int:
        """Return into how many micro-batches a step can be cut at most, over all replicas."""
        ...

    def trials(self, microbatch_sizes: Sequence[int], most: int) -> list[TrialStep]:
        """Return the steps whose pieces are to be timed, to know what a micro-batch costs.

        Args:
            microbatch_sizes: rows of a micro-batch, as `microbatch_size` returns it, that costs
                should be known for.
            most: the largest number of micro-batches of a step.
        """
        ...

    @property
    def typical_microbatch(self) -> Amounts | None:
        """The size of a micro-batch, if its costs follow from more than its number of rows."""
        ...

    def describe_step(self, layout: Layout) -> str:
        """Say what one step takes, such as `100 samples`."""
        ...

    def steps_per_epoch(self, layout: Layout) -> int:
        """Return the number of optimizer steps that visit the training data once."""
        ...

    def fill(self, layout: Layout, item: int) -> Fill:
        """Return how full the batch of a step is.

        Args:
            layout: the degrees.
            item: one of the step's items; those of its team are meant too.
        """
        ...

    def fill_of_test(self, layout: Layout, num_pipelines: int, num_samples: int) -> Fill:
        """Return how full a batch of an evaluation is.

        Args:
            layout: the degrees.
            num_pipelines: how many pipelines share the evaluation.
            num_samples: of the batch, over all of these.
        """
        ...

    def why_not_recorded(self, layout: Layout) -> str | None:
        """Say why steps cannot be recorded as one CUDA graph; None if they can."""
        ...

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

    def slicing(self, model: StagedModel) -> Slicing:
        """Return which sides of a model's tensors are divided among sub-networks.

        Args:
            model: the unsplit model or a stage of it; it may be on the meta device.
        """
        ...

    def tally(self, splits: Sequence[str], device: torch.device) -> Tally:
        """Begin to add up the scores of some splits."""
        ...

    def num_rows(self, layout: Layout, item: int, num_samples: int) -> int:
        """Return how many images or nodes a step takes.

        Args:
            layout: the degrees.
            item: one of the step's items; those of its team are meant too.
            num_samples: what its loss is the mean of.
        """
        ...

    def rates(
        self, layout: Layout, item: int, num_samples: int, seconds: float
    ) -> dict[str, float]:
        """Return what the row of a step says of its samples; see `num_rows`.

        That of a partial batch also says how full it is (`vigpipe.job.rows.partial_batch`).
        """
        ...

    @property
    def fingerprint(self) -> dict[str, object]:
        """Numbers that identify the data, whatever folder it is in."""
        ...

    def cost_options(self) -> dict[str, str]:
        """Return what the costs of the model's pieces depend on in the data."""
        ...

    def weights_metadata(self) -> dict[str, object]:
        """Return what the weights' file says of the model and its inputs; None is left out."""
        ...

    def summary(self) -> dict[str, object]:
        """Return what summary.json says of the data, besides its name."""
        ...
