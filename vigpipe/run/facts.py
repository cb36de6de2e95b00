"""Decide the facts of a run, and check them together before any process group exists."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vigpipe.config.freeze import parse_freeze
from vigpipe.config.options import TrainConfig
from vigpipe.config.resolve import resolved
from vigpipe.errors import InputError
from vigpipe.job.job import Job
from vigpipe.job.rows import Fill
from vigpipe.model.blocks import FewNodesWarning
from vigpipe.model.fit import num_classes_in
from vigpipe.model.slicing import INPUT
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan, even_plan, read_plan
from vigpipe.replication.course import Course
from vigpipe.replication.feedback import notes_on_compression
from vigpipe.run.initial_weights import initial_state, notes_on_weights, read_initial
from vigpipe.run.open_job import open_job
from vigpipe.run.trackers import check_tracker

if TYPE_CHECKING:
    from vigpipe.run.open_job import LeftOut


@dataclass(frozen=True)
class Run:
    """The facts of a run, decided and checked."""

    config: TrainConfig  # with the defaults of the model filled in
    job: Job
    layout: Layout
    plan: Plan
    parameter_order: dict[str, int]  # index of every parameter in the unsplit model, by name
    dtype: torch.dtype  # of the weights
    notes: tuple[str, ...] = ()  # sentences that the user should read before the run
    classes_before: int | None = None  # that the last layer of --weights tells apart, if it has one

    def __post_init__(self) -> None:
        # The job has the options too, and keeps them when a run is made from another.
        object.__setattr__(self, "job", self.job.with_options(self.config))

    @property
    def batch_size(self) -> int:
        """B, the rows of a full step of all replicas, or of a sub-network; padding counts."""
        return self.job.batch_size(self.batch_layout)

    @property
    def microbatch_size(self) -> int:
        """Rows of a micro-batch, padding included."""
        return self.job.microbatch_size(self.batch_layout)

    @property
    def steps_per_epoch(self) -> int:
        return self.job.steps_per_epoch(self.batch_layout)

    @property
    def num_subnetworks(self) -> int:
        """Number of sub-models that share the channels of the model; 1 if none is divided."""
        return self.layout.num_replicas if self.has_subnetworks else 1

    @property
    def has_subnetworks(self) -> bool:
        return self.config.strategy == "subnetworks"

    @property
    def batch_layout(self) -> Layout:
        """The layout whose replicas share a batch: each sub-network takes whole ones."""
        if not self.has_subnetworks:
            return self.layout
        return replace(self.layout, num_replicas=1, num_teams=1)

    def in_batches(self, item: int) -> tuple[Layout, int]:
        """Return the layout whose replicas share a batch, and the number that an item has in it.

        Of m sub-networks, item k is step k // m of sub-network k % m. Each takes all the data in
        an order of its own: its epoch e is the epoch e * m + k % m of a run on one replica.
        """
        if not self.has_subnetworks:
            return self.layout, item
        step, replica = divmod(item, self.num_subnetworks)
        epoch, of_epoch = divmod(step, self.steps_per_epoch)
        epoch = epoch * self.num_subnetworks + replica
        return self.batch_layout, epoch * self.steps_per_epoch + of_epoch

    def fill(self, item: int) -> Fill:
        return self.job.fill(*self.in_batches(item))

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run; with sub-networks, of each of them."""
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        return -(-self.config.epochs // self.num_subnetworks) * self.steps_per_epoch

    @property
    def course(self) -> Course:
        """The steps of the run as plain numbers."""
        every = self.config.evaluate_every
        return Course(self.num_steps, self.steps_per_epoch, every, self.layout.num_replicas)

    @property
    def num_recomputed(self) -> int:
        """Number of micro-batches, from the first of a step, whose forward is computed twice."""
        num_microbatches = self.layout.num_microbatches
        by_option = {"never": 0, "except-last": num_microbatches - 1, "always": num_microbatches}
        return by_option[self.config.recompute]

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Dtype of the features and gradients that pass from stage to stage."""
        return torch.bfloat16 if self.config.boundary == "bfloat16" else self.dtype

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype of the matrix products; None for that of the weights."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.config.dtype)

    def build(self) -> StagedModel:
        """Build the unsplit model from the seed or --weights; or a sub-network, for `run.wide`."""
        torch.manual_seed(self.config.seed)
        model = self._make_model(self.num_subnetworks).to(self.dtype)
        if self.config.weights is not None and not self.has_subnetworks:
            state = read_initial(self.config.weights)
            model.load_state_dict(initial_state(state, self.config, self.job, model))
        model.set_detect_anomaly(self.config.detect_anomaly)
        return model

    def _make_model(self, num_parts: int = 1) -> StagedModel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewNodesWarning)  # it is among the notes
            model = self.job.make_model(num_parts)
        model.freeze(frozen_pieces(self.config, model))
        return model

    def make_wide_model(self) -> StagedModel:
        """Make the unsplit model on the meta device, as a run on a single replica has it."""
        with torch.device("meta"):
            return self._make_model()

    @cached_property
    def wide_model(self) -> StagedModel:
        """What `make_wide_model` makes, made once, for its names and shapes."""
        return self.make_wide_model()

    def rates(self) -> dict[str, tuple[float, float]]:
        """Return the rate scale and the weight decay of every parameter that is trained."""
        from timm.optim import param_groups_layer_decay

        assert self.config.weight_decay is not None
        model = self.wide_model
        # Biases, norms and those in `no_weight_decay` do not decay, and --layer-decay multiplies
        # the learning rate by that factor for every layer before the last.
        groups = param_groups_layer_decay(
            model,
            self.config.weight_decay,
            no_weight_decay_list=model.no_weight_decay(),
            layer_decay=self.config.layer_decay or 1.0,
        )
        rates = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
        return {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}

    def unknown_of_data(self, before: Mapping[str, object]) -> list[str]:
        """Return the digests of the data that the `fingerprint` of an older vigpipe lacks."""
        return [n for n in self.fingerprint if n.startswith("SHA-256") and n not in before]

    def differs_in_data(self, before: Mapping[str, object]) -> str | None:
        """Return what differs from an earlier `fingerprint`, but for what that lacks."""
        unknown = self.unknown_of_data(before)
        now = {name: value for name, value in self.fingerprint.items() if name not in unknown}
        return next((name for name, value in now.items() if before.get(name) != value), None)

    @cached_property
    def fingerprint(self) -> dict[str, object]:
        """Numbers that identify the data, whatever folder it is in."""
        return self.job.fingerprint

    def weights_metadata(self) -> dict[str, str]:
        """Return the metadata of this run's weights file: the model, and what its inputs are."""
        metadata = {"model": self.config.model, **self.job.weights_metadata()}
        return {name: str(value) for name, value in metadata.items() if value is not None}

    def unsplit(self) -> "Run":
        """Return the reference run: one process, the same D x M micro-batches in the same order."""
        total_microbatches = self.layout.num_replicas * self.layout.num_microbatches
        layout = Layout(num_microbatches=total_microbatches)
        all_blocks = tuple(block for stage in self.plan.stages for block in stage)
        # It sums and multiplies on the same threads.
        config = replace(self.config, sparse_threads=0)
        return replace(self, config=config, layout=layout, plan=Plan((all_blocks,)))


def prepare(
    config: TrainConfig,
    dtype: torch.dtype,
    left_out: "LeftOut" = frozenset(),
    ranks_on_host: int | None = None,
    num_hosts: int | None = None,
    opened: Callable[[TrainConfig], Job] | None = None,
) -> Run:
    """Decide the facts of a run from its options as the user gave them, and check them together.

    Parts of the data, such as images that cannot be read, may be left out. Without `ranks_on_host`,
    all ranks share a host; `num_hosts` says instead how many hosts a run had that is done again.
    `opened` makes the job, if it is not to be made of the options alone.
    """
    config = resolved(config)
    check_tracker(config.track)
    job = open_job(config, left_out) if opened is None else opened(config)
    config = job.config
    if config.final == "best" and not any("validation" in splits for splits in job.passes):
        raise InputError(
            f"--final best: the validation {job.unit} choose the best replica, and there are none; "
            "hold some out with --validation 0.1, or choose --final mean"
        )
    with torch.device("meta"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FewNodesWarning)
        model = job.make_model()
    classes_before = None
    if config.weights is not None:
        state = read_initial(config.weights)
        initial_state(state, config, job, model)
        classes_before = num_classes_in(state, model)
    num_blocks = len(model.numbered_blocks)
    if frozen_pieces(config, model) and config.strategy == "subnetworks":
        raise InputError(
            f"--freeze {config.freeze}: keeps pieces of the model as they are, and --strategy "
            "subnetworks divides all of them; leave one of the two out"
        )

    virtual_stages = config.virtual_stages
    if isinstance(config.stages, Path):
        plan = read_plan(config.stages, config.model, num_blocks)
        if virtual_stages < 1 or plan.num_stages % virtual_stages:
            raise InputError(
                f"{config.stages}: {plan.num_stages} stages cannot be shared by ranks of "
                f"--virtual-stages {virtual_stages} each; change the plan or the option"
            )
        pipeline_size = plan.num_stages // virtual_stages
    else:
        assert config.stages != "auto", "start.run_on_ranks decides how many"
        plan, pipeline_size = None, config.stages
    layout = Layout(
        pipeline_size,
        config.microbatches,
        config.dp,
        config.schedule,
        virtual_stages,
        has_server=config.strategy == "server",
        num_shards=config.shards,
    )
    if num_hosts is not None and layout.world_size % num_hosts == 0:
        ranks_on_host = layout.world_size // num_hosts
    layout = replace(layout, num_teams=_num_teams(config, layout, ranks_on_host))
    plan = plan or even_plan(num_blocks, pipeline_size * virtual_stages)

    if config.compile and config.recompute != "never":
        raise InputError(
            f"--compile with --recompute {config.recompute}: a compiled block cannot tell a "
            "repetition from a first run, and BatchNorm would count twice; leave one out"
        )
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    run = Run(config, job, layout, plan, order, dtype, classes_before=classes_before)
    job.check(run.batch_layout, model, plan)
    if run.has_subnetworks:
        _check_divisible(config, job, model)
    notes = [*(str(warning.message) for warning in caught), *job.notes]
    notes += notes_on_weights(config, job)
    if config.average is not None and layout.num_teams == 1:
        what = "replica" if layout.num_replicas == 1 else "host"
        notes.append(f"--strategy {config.strategy}: there is one {what}, so nothing is averaged")
    if config.compress != "none":
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        notes += notes_on_compression(config, shapes, dtype.itemsize, layout.num_teams)
    return replace(run, notes=tuple(notes))


def frozen_pieces(config: TrainConfig, model: StagedModel) -> frozenset[str]:
    """Return the pieces of the unsplit model that are not trained; see `StagedModel.freeze`."""
    ends = {"stem": model.stem_names, "readout": model.readout_names}
    there = [end for end, names in ends.items() if names]
    return parse_freeze(config.freeze, len(model.numbered_blocks), there)


def _check_divisible(config: TrainConfig, job: Job, model: StagedModel) -> None:
    """Raise InputError if the channels of a model cannot be divided among the sub-networks."""
    sizes = job.slicing(model).sizes
    if not sizes:
        raise InputError(
            f"--strategy subnetworks: {config.model} with --layers {config.layers} has no channels "
            "between layers that could be divided; take more layers, or another strategy"
        )
    for group, size in sizes.items():
        if group == INPUT and size % config.dp:
            together = math.gcd(*sizes.values())
            choices = [str(n) for n in range(2, together + 1) if together % n == 0]
            what = f"choose --dp {' or '.join(choices)}" if choices else "no --dp but 1 does that"
            raise InputError(
                f"--partition-input: divides {size} features equally among as many replicas as "
                f"--dp says, which is {config.dp}; {what}, or leave it out"
            )
        if size % config.dp:
            width = "" if config.width is None else ", or --width"  # models of images have none
            raise InputError(
                f"--dp {config.dp}: --strategy subnetworks divides {size} channels among as many "
                f"replicas, so their number must be a divisor of that; choose another --dp{width}"
            )


def _num_teams(config: TrainConfig, layout: Layout, ranks_on_host: int | None) -> int:
    """Return how many teams the replicas form, each of those that take every step together."""
    if config.strategy == "synchronous":
        return 1
    if config.gossip_between != "hosts":
        return layout.num_replicas
    on_host = layout.world_size if ranks_on_host is None else ranks_on_host
    if on_host % layout.replica_size or layout.world_size % on_host:
        degree = f"--stages {layout.pipeline_size}"
        if layout.num_shards > 1:
            degree = f"--shards {layout.num_shards}"
        raise InputError(
            f"--gossip-between hosts: expected the same number of whole replicas on every host, "
            f"and a host has {on_host} of {layout.world_size} ranks, with {degree}; start a "
            f"multiple of {layout.replica_size} ranks on each"
        )
    num_teams = layout.world_size // on_host
    if config.pairs == "sets" and num_teams % 2:
        raise InputError(
            f"--pairs sets: even hosts draw odd ones, so their number must be even, and there are "
            f"{num_teams}; choose --pairs any"
        )
    return num_teams
