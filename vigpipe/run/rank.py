"""Hold one rank's state in a run: its stages of the model, its optimizer, and their helpers."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from vigpipe.config.replication import OUTLIVING
from vigpipe.job.fill import Fill
from vigpipe.job.job import Feed, Merged
from vigpipe.launch.device import record_graph, runs_ahead, send
from vigpipe.launch.environment import FOLDER_VARIABLE, LONG_WAIT_SECONDS
from vigpipe.launch.failures import declare_lost
from vigpipe.launch.watchdog import ended
from vigpipe.model.compiled import compile_blocks
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.norm import PooledStatistics
from vigpipe.model.regions import listening
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.agreement import Peers, broadcast_value
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.gradients import Replicas
from vigpipe.parallel.layout import Groups, Layout, make_groups
from vigpipe.parallel.schedule import ROWS_AT_ONCE, Pipeline
from vigpipe.parallel.shards import Shards
from vigpipe.parallel.split import StageModule, cut_stages
from vigpipe.replication.choose import make_strategy
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.feedback import make_compressor
from vigpipe.replication.own_steps import OwnSteps, Weights
from vigpipe.replication.place import Place
from vigpipe.replication.record import Recorded
from vigpipe.replication.strategy import Strategy
from vigpipe.replication.subnetworks.columns import RankColumns
from vigpipe.replication.subnetworks.rows import Rows
from vigpipe.replication.subnetworks.strategy import Subnetworks
from vigpipe.run.facts import Run
from vigpipe.run.loss_scale import LossScale
from vigpipe.run.optimizer import SKIPPING, make_optimizer
from vigpipe.run.own_order import OwnOrder
from vigpipe.run.recorded import is_recorded, sync_of
from vigpipe.run.wide import describe_wide
from vigpipe.spans import Kind
from vigpipe.timing.clock import Stopwatch, make_clock
from vigpipe.timing.recorder import Phase, Recorder

if TYPE_CHECKING:
    from vigpipe.run.step import Step


class Scorers(NamedTuple):
    """The replicas that share an evaluation.

    Attributes:
        num_pipelines: how many pipelines share it.
        place: which of them this rank's is.
        counterparts: the ranks with the same stages in these replicas.
    """

    num_pipelines: int
    place: int
    counterparts: Counterparts


@dataclass
class RankState:
    """The state of one rank.

    Attributes:
        run: the facts of the run.
        device: where this rank computes.
        replica_index: the replica that this rank belongs to.
        pipeline_rank: position of this rank in its pipeline.
        pipeline_group: the ranks of its pipeline; None if the pipeline has a single rank.
        models: this rank's stages; their parameters have the names of the unsplit model.
        pipeline: runs micro-batches through the stages.
        strategy: says what this rank does next, and how the replicas agree.
        replicas: adds up the gradients of the replicas that take a step together.
        counterparts: the ranks that hold the same stages, of all replicas.
        scorers: the replicas that share an evaluation.
        shards: the ranks that share the batches of its replica.
        merged: this rank's share of the wide model of sub-networks, which is evaluated instead of
            its own; None if there are none.
        own_scores: of each sub-network by itself, once they are known: numbers by name, for each
            split of the data.
        leads: whether this replica writes the run's files.
        statistics: pools BatchNorm's running statistics over micro-batches and replicas.
        optimizer: updates this rank's parameters.
        lr_schedule: timm's schedule of the learning rate, counted in optimizer steps.
        feed: this rank's batches.
        ema: timm's moving average of `models`; None if it is off.
        loss_scale: the factor of the loss in float16; None for other types.
        recorder: records what this rank does in a step; None if the run is not timed.
        stopwatch: measures the time of a step, and of this rank's forwards and backwards in it.
        runs_ahead: whether the host hands out a step before it knows the outcome of the last one.
        step: number of optimizer steps handed out, including skipped ones.
        open_step: the last step, until `run.step.complete_step` has completed it; else None.
        busy_seconds: duration of the forwards and backwards of the last complete step.
        data_seconds: for how long this rank waited for the last batch.
    """

    run: Run
    device: torch.device
    replica_index: int
    pipeline_rank: int
    pipeline_group: dist.ProcessGroup | None
    models: list[StagedModel]
    pipeline: Pipeline
    strategy: Strategy
    replicas: Replicas
    counterparts: Counterparts
    scorers: Scorers
    shards: Shards
    merged: Merged | None
    leads: bool
    statistics: PooledStatistics
    optimizer: torch.optim.Optimizer
    lr_schedule: Any
    feed: Feed
    ema: ModelEmaV3 | None
    loss_scale: LossScale | None
    recorder: Recorder | None
    stopwatch: Stopwatch
    runs_ahead: bool
    own_scores: list[dict[str, dict[str, float]]] = field(default_factory=list)
    step: int = 0
    open_step: "Step | None" = None
    busy_seconds: float = 0.0
    data_seconds: float = 0.0

    @property
    def own_steps(self) -> OwnSteps | None:
        """The strategy, if replicas take steps of their own; None if they take each together."""
        return self.strategy if isinstance(self.strategy, OwnSteps) else None

    @property
    def rows(self) -> Rows | None:
        """What this rank stores of the wide model of sub-networks; None if there are none."""
        return self.strategy.rows if isinstance(self.strategy, Subnetworks) else None

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the first rank of the run."""
        return self.replica_index == self.pipeline_rank == self.shards.place == 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files: one of the last stage of the first replica."""
        return self.leads and self.pipeline.has_last and self.shards.place == 0

    @property
    def lr(self) -> float:
        """Learning rate of the last step, for the last layer."""
        group = self.optimizer.param_groups[0]
        return group["lr"] / group["lr_scale"]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the unsplit model."""
        return {name: p for model in self.models for name, p in model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's entries of the unsplit model's state dict."""
        return {k: v for model in self.models for k, v in model.state_dict().items()}

    def average(self) -> dict[str, Tensor]:
        """Return the moving average of `state` by the same names; empty if it is off."""
        if self.ema is None:
            return {}
        return {k: v for model in self.ema.module for k, v in model.state_dict().items()}

    def follow_schedule(self, step: int) -> None:
        """Set the learning rates to those of a step's index."""
        if step:  # those of step 0 are set from the start
            self.lr_schedule.step_update(step)

    def has_open_step_come(self) -> bool:
        """Whether the outcome of the last step is on the host."""
        return self.open_step is None or self.open_step.outcome.has_come()

    def enter(self, kind: Kind) -> None:
        """Tell the recorder, if there is one, what this rank does from now on."""
        if self.recorder is not None:
            self.recorder.enter(kind)

    @contextmanager
    def timed(self, phase: Phase, number: int, fill: Fill | None = None) -> Iterator[None]:
        """Record what happens in this context as a numbered training step or evaluation batch.

        Args:
            phase: training or evaluation.
            number: of the step or batch.
            fill: how full its batch is; None where every step has the same one.
        """
        if self.recorder is None:
            yield
            return
        of_batch = () if fill is None else fill
        with self.recorder.step(phase, number, *of_batch), listening(self.recorder.region):
            yield

    def copy_from(self, place: int, counterparts: Counterparts) -> None:
        """Take the weights of another replica, with its statistics and averages; all do so.

        Args:
            place: of the other one among the counterparts.
            counterparts: the ranks with the same stages that do so.
        """
        with counterparts.at_once():
            for tensor in (*self.state().values(), *self.average().values()):
                counterparts.copy_from(place, tensor)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights by their moving average in this context."""
        assert self.ema is not None
        self._exchange(self.ema)
        try:
            yield
        finally:
            self._exchange(self.ema)

    def _exchange(self, ema: ModelEmaV3) -> None:
        # Values are copied because DDP, gradient views and the optimizer refer to the tensors.
        averages = ema.module.state_dict()
        for name, tensor in nn.ModuleList(self.models).state_dict().items():
            average = averages[name]
            weights = tensor.clone()
            tensor.copy_(average)
            average.copy_(weights)


def make_rank_state(
    run: Run,
    rank: int,
    device: torch.device,
    recorder: Recorder | None = None,
    recorded: Sequence[Recorded] | None = None,
    strategy: Strategy | None = None,
    shards: Shards | None = None,
) -> RankState:
    """Build the state of one rank at the start of a run.

    With several ranks, the process group must exist, and all ranks call this together; except with
    a strategy that is given, which is for a rank that has no peers, whatever the layout is.

    Args:
        run: the facts of the run.
        rank: position in the world.
        device: where this rank computes.
        recorder: records what the rank does in the steps it is asked to; None for no timing.
        recorded: what each replica is to do again; None if it is free.
        strategy: that of a rank without peers; by default the one that the options name.
        shards: what stands for the ranks that share its batch, for a rank without peers.
    """
    layout, config = run.layout, run.config
    sync, on_gpu = sync_of(run, device), runs_ahead(device)
    has_graph = is_recorded(run, sync, on_gpu=on_gpu, is_timed=recorder is not None)
    groups = Groups()
    if layout.world_size > 1 and strategy is None:
        linked = config.strategy in OUTLIVING
        groups = make_groups(layout, config.timeout or LONG_WAIT_SECONDS, linked=linked)

    stage_indices, of_batch = layout.stages_of(rank), run.batch_layout
    models = cut_stages(run.build, run.plan, stage_indices)
    stage_modules = _stage_modules(run, models, device)

    holder = nn.ModuleList(models)
    ema = (
        ModelEmaV3(holder, decay=config.ema) if config.ema else None
    )  # copied before hooks are registered
    if config.compile:
        for model in models:
            compile_blocks(model)
    reducing = None if recorder is None else partial(recorder.enter, "all-reduce")
    statistics = PooledStatistics(models, layout.num_microbatches)
    replica_index = layout.replica_index(rank)
    parameters = {name: p for model in models for name, p in model.named_parameters()}
    optimizer = make_optimizer(config, _parameter_groups(run, models))
    if strategy is None:
        team, of_team = layout.team_of(replica_index)
        place = Place(
            team=team,
            of_team=of_team,
            team_size=layout.team_size,
            is_server=replica_index == layout.num_replicas,
            is_first=rank % (layout.team_size * layout.replica_size) == 0,
            rank=rank,
            peers=Peers(layout.team_size * layout.replica_size, groups.team),
            num_ranks=layout.world_size,
            num_teams=layout.num_teams + layout.has_server,
            between=Counterparts(groups.between),
            links=groups.links,
            has_ended=partial(_has_ended, layout=layout),
            give_up=_give_up,
            open_store=partial(_open_store, layout.world_size),
            timeout_seconds=config.timeout or LONG_WAIT_SECONDS,
            num_moments=3 * layout.team_size * layout.num_microbatches * statistics.num_channels,
        )
        names = {id(b): name for model in models for name, b in model.named_buffers()}
        running = {names[id(statistic)]: statistic for statistic in statistics.running}
        weights = Weights(parameters, running)
        describe = partial(describe_wide, run, models, optimizer)
        strategy = make_strategy(config, run.course, place, weights, recorded, describe)
    teammates, shards = Counterparts(groups.teammates), shards or Shards(groups.shards)
    if shards.size > 1:
        run.job.share_models(models, shards)
    scorers = Scorers(layout.team_size, layout.team_of(replica_index)[1], teammates)
    compressor = None
    if config.strategy == "synchronous":
        compressor = make_compressor(config, Exchange(teammates), parameters)
    replicas = Replicas(
        stage_modules,
        groups.summed,
        layout.num_microbatches,
        sync,
        reducing,
        compressor,
        groups.shards,
    )
    stopwatch = Stopwatch(make_clock(device))
    loss_scale = LossScale(device) if run.lowered_dtype == torch.float16 else None
    pipeline = Pipeline(
        stage_modules,
        replicas.modules,
        stage_indices,
        layout,
        device,
        groups.pipeline,
        run.job.loss(None if loss_scale is None else loss_scale.factor),
        partial(send, device=device),
        recorder,
        stopwatch,
    )
    if has_graph:
        # The loss of a full step is the mean of its team's samples.
        pipeline.record_steps(record_graph, run.batch_size // of_batch.num_teams)
    merged = None
    if isinstance(strategy, Subnetworks):
        rows = strategy.rows
        merged = _merged(run, rank, rows, pipeline, groups)
        if run.job.merges_whole:
            scorers = Scorers(rows.between.size, rows.between.place, rows.between)
    feed = run.job.feed(
        of_batch,
        0 if run.has_subnetworks else replica_index,
        device,
        run.dtype,
        has_first=pipeline.has_first,
        has_last=pipeline.has_last,
        shards=shards,
    )
    return RankState(
        run=run,
        device=device,
        replica_index=replica_index,
        pipeline_rank=layout.pipeline_rank(rank),
        pipeline_group=groups.pipeline,
        models=models,
        pipeline=pipeline,
        strategy=strategy,
        replicas=replicas,
        counterparts=Counterparts(groups.replicas),
        scorers=scorers,
        shards=shards,
        merged=merged,
        leads=replica_index == layout.writer,
        statistics=statistics,
        optimizer=optimizer,
        lr_schedule=_lr_schedule(run, optimizer),
        feed=OwnOrder(feed, run) if run.has_subnetworks else feed,
        ema=ema,
        loss_scale=loss_scale,
        recorder=recorder,
        stopwatch=stopwatch,
        runs_ahead=on_gpu and config.opt in SKIPPING,
    )


def _merged(run: Run, rank: int, rows: Rows, pipeline: Pipeline, groups: Groups) -> Merged:
    """Return a rank's share of the wide model of sub-networks."""
    stage_indices, device = run.layout.stages_of(rank), pipeline.device
    stages = cut_stages(run.make_wide_model, run.plan, stage_indices)
    if run.job.merges_whole:
        stages = [stage.to(run.dtype).to_empty(device=device) for stage in stages]
        modules = _stage_modules(run, stages, device)
        facts = stage_indices, run.layout, device, groups.pipeline
        loss, to_device = run.job.loss(None), partial(send, device=device)
        pipeline = Pipeline(modules, modules, *facts, loss, to_device)
    columns = RankColumns(rows.between)
    share = WideShare(rows.wide.slicing, rows.stored, rows.whole, columns, ROWS_AT_ONCE)
    return run.job.merged(stages, share, pipeline)


def _stage_modules(
    run: Run, models: Sequence[StagedModel], device: torch.device
) -> list[StageModule]:
    """Make what runs a rank's stages on micro-batches."""
    options = (run.dtype, run.lowered_dtype, run.boundary_dtype, run.num_recomputed)
    stage_modules: list[StageModule] = []
    for model in models:
        first, last = (run.job.rows_before(run.batch_layout, block) for block in model.span)
        ends = None if first == last == run.microbatch_size else (first, last)
        stage_module = StageModule(model, run.microbatch_size, run.job.row_shape, *options, ends)
        stage_modules.append(stage_module.to(device))
    return stage_modules


def _open_store(world_size: int) -> Any:  # noqa: ANN401 - torch does not export the class
    """Return a new section of the store where the ranks have met; all ranks call this together."""
    if world_size == 1:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    token = broadcast_value(secrets.token_hex(4), world_size)  # torchrun may start ranks again
    return dist.PrefixStore(token, dist.distributed_c10d._get_default_store())  # pyright: ignore


def _has_ended(team: int, layout: Layout) -> bool:
    """Whether a process of a team is known to have ended: one that start_local has started."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return folder is not None and ended(Path(folder), layout.ranks_of_team(team))


def _give_up(team: int) -> None:
    """Let start_local, if it has started the ranks, end what is left of a team."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        declare_lost(Path(folder), team)


def _parameter_groups(run: Run, models: list[StagedModel]) -> list[dict[str, Any]]:
    """Group this rank's parameters by rate scale and weight decay."""
    rates = run.rates()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            groups.setdefault(rates[name], []).append(parameter)
    return [
        {
            "params": parameters,
            "lr_scale": scale,
            "weight_decay": decay,
        }  # timm's schedules read lr_scale
        for (scale, decay), parameters in groups.items()
    ]


def _lr_schedule(run: Run, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401
    # timm counts epochs; an "epoch" of one update makes it count optimizer steps.
    config = run.config
    warmup = (config.warmup_epochs or 0) * run.steps_per_epoch
    warmup = -(-warmup // run.num_subnetworks)  # as many batches of all of them together
    warmup = min(warmup, run.num_steps // 2)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="cosine" if config.lr_schedule == "cosine" else "step",
        num_epochs=run.num_steps,
        decay_epochs=1,
        decay_rate=1.0,  # without decay, a step schedule is constant after the warm-up
        min_lr=config.min_lr or 0.0,
        warmup_lr=config.warmup_lr,
        warmup_epochs=warmup,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule
