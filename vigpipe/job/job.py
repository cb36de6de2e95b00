"""What a run asks of its job: what is trained on, and with which model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from vigpipe.config.options import TrainConfig
from vigpipe.job.feed import JobFeed
from vigpipe.job.rows import Fill
from vigpipe.job.score import JobScores
from vigpipe.model.slicing import Slicing
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan
from vigpipe.planning.profile import Amounts


class TrialStep(NamedTuple):
    """A step of one process, which is timed."""

    config: TrainConfig
    num_microbatches: int
    item: int
    # What the costs of one of its micro-batches follow from, by name, such as its nodes and its
    # edges; its rows first.
    size: Mapping[str, int]


class JobFacts(Protocol):
    """What a job is; the same on every rank."""

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
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes by label; those without names are called after their labels."""
        ...

    @property
    def description(self) -> str:
        """How many samples and classes the data have, in a phrase."""
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

        With several parts, make one of so many sub-models, which share the model's channels. It may
        warn (`vigpipe.model.blocks.FewNodesWarning`); a run tells the user so once.
        """
        ...

    def check(self, layout: Layout, model: StagedModel, plan: Plan) -> None:
        """Raise InputError if the data or the model, on the meta device, cannot be cut so."""
        ...

    def batch_size(self, layout: Layout) -> int:
        """Return B, the rows of a full step over all replicas."""
        ...

    def microbatch_size(self, layout: Layout) -> int:
        """Return the rows of a micro-batch, padding included."""
        ...

    def rows_before(self, layout: Layout, block: int) -> int:
        """Return the rows of a micro-batch that reach a block, padding included.

        The number of blocks stands for what comes after the last one.
        """
        ...

    def most_microbatches(self, layout: Layout) -> int:
        """Return into how many micro-batches a step can be cut at most, over all replicas."""
        ...

    def trials(self, microbatch_sizes: Sequence[int], most: int) -> list[TrialStep]:
        """Return the steps whose pieces are to be timed, to know what a micro-batch costs.

        The costs should be known for micro-batches of these sizes, as `microbatch_size` returns
        them, and for steps of at most `most` micro-batches.
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
        """Return how full the batch of a step is, which any one of its items names."""
        ...

    def why_not_recorded(self, layout: Layout) -> str | None:
        """Say why steps cannot be recorded as one CUDA graph; None if they can."""
        ...

    def slicing(self, model: StagedModel) -> Slicing:
        """Return which sides of the tensors of a model or stage, perhaps on meta, are divided."""
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


class Job(JobFacts, JobFeed, JobScores, Protocol):
    """What a run trains on, and with which model."""
