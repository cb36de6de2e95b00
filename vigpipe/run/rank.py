"""Hold one rank's state in a run: where it stands, what it trains, and what it trains with."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vigpipe.job.feed import Feed, Merged, Needs
from vigpipe.job.rows import Fill
from vigpipe.launch.device import ToHost, record_graph, runs_ahead, send
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.regions import listening
from vigpipe.parallel.agreement import Agreement
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.gradients import GradientReducer
from vigpipe.parallel.schedule import ROWS_AT_ONCE, Pipeline
from vigpipe.parallel.shards import Shards
from vigpipe.parallel.split import cut_stages
from vigpipe.replication.choose import make_strategy
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.feedback import make_compressor
from vigpipe.replication.own_steps import OwnSteps, Weights
from vigpipe.replication.record import Recorded
from vigpipe.replication.strategy import Strategy
from vigpipe.replication.subnetworks.columns import RankColumns
from vigpipe.replication.subnetworks.rows import WideRows
from vigpipe.replication.subnetworks.strategy import Subnetworks
from vigpipe.run.facts import Run
from vigpipe.run.mesh import Mesh, make_mesh, position_in
from vigpipe.run.optimizer import SKIPPING
from vigpipe.run.recorded import is_recorded, sync_of
from vigpipe.run.trained import Trained, make_stage_modules, make_trained
from vigpipe.run.wide import describe_wide
from vigpipe.spans import SpanKind
from vigpipe.timing.clock import Lap, Stopwatch, make_clock
from vigpipe.timing.recorder import Phase, Recorder


@dataclass
class HandedStep:
    """A step that this rank has handed to its device."""

    number: int  # counted from 1
    lr: float  # for the last layer
    agreement: Agreement
    stats: Tensor  # those of BatchNorm in all micro-batches, (D * M, 3, channels)
    # (4,) float64: the loss, which means nothing on ranks that do not know it; whether the numbers
    # of all peers are finite, 1 or 0; whether the step is taken; and the factor of the loss.
    outcome: ToHost
    lap: Lap
    # Whether the device has done the step; what follows is known only then.
    is_complete: bool = False
    is_finite: bool = False  # the gradients and the loss of all peers
    is_taken: bool = False  # so that the weights have changed
    loss: float | None = None  # over the global batch, on ranks of the last stage; None on others
    loss_factor: float = 1.0  # not 1 only in float16
    seconds: float = math.nan
    busy_seconds: float = math.nan  # of this rank's forwards and backwards, without waiting


@dataclass
class RankState:
    """The state of one rank."""

    run: Run
    device: torch.device
    mesh: Mesh
    trained: Trained
    strategy: Strategy
    feed: Feed
    pipeline: Pipeline
    reducer: GradientReducer
    scorers: Counterparts  # the ranks with the same stages of replicas that share an evaluation
    merged: Merged | None  # a wide model of sub-networks, which is evaluated instead of its own
    writes_files: bool  # whether its replica writes the run's files
    recorder: Recorder | None  # None if the run is not timed
    stopwatch: Stopwatch  # of a step, and of its forwards and backwards
    runs_ahead: bool  # whether a step is handed out before the outcome of the last one is known
    # Of each sub-network by itself, once they are known: numbers by name, for each split.
    own_scores: list[dict[str, dict[str, float]]] = field(default_factory=list)
    step: int = 0  # number of optimizer steps handed out, including skipped ones
    num_not_finite: int = 0  # those of them, since the start or the checkpoint, that were skipped
    open_step: HandedStep | None = None  # the last one, until `complete_step` has completed it
    busy_seconds: float = 0.0  # of the forwards and backwards of the last complete step
    data_seconds: float = 0.0  # for how long this rank waited for the last batch

    @property
    def own_steps(self) -> OwnSteps | None:
        """The strategy, if replicas take steps of their own; None if they take each together."""
        return self.strategy if isinstance(self.strategy, OwnSteps) else None

    @property
    def wide_rows(self) -> WideRows | None:
        """What this rank stores of the wide model of sub-networks; None if there are none."""
        return self.strategy.wide_rows if isinstance(self.strategy, Subnetworks) else None

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files: one of the last stage of the first replica."""
        return self.writes_files and self.pipeline.has_last and self.mesh.shards.rank == 0

    def has_open_step_come(self) -> bool:
        """Whether the outcome of the last step is on the host."""
        return self.open_step is None or self.open_step.outcome.has_come()

    def enter(self, kind: SpanKind) -> None:
        """Tell the recorder, if there is one, what this rank does from now on."""
        if self.recorder is not None:
            self.recorder.enter(kind)

    @contextmanager
    def timed(self, phase: Phase, number: int, fill: Fill | None = None) -> Iterator[None]:
        """Record this context as a numbered step or test batch, which is as full as `fill`."""
        if self.recorder is None:
            yield
            return
        with self.recorder.step(phase, number, *fill or ()), listening(self.recorder.region):
            yield


def make_rank_state(
    run: Run,
    rank: int,
    device: torch.device,
    recorder: Recorder | None = None,
    recorded: Sequence[Recorded] | None = None,
    strategy: Strategy | None = None,
    shards: Shards | None = None,
) -> RankState:
    """Build the state of one rank at the start of a run; with several, all call this together.

    A rank with a given strategy has no peers, and `shards` stands for those that share its batch.
    """
    layout, config = run.layout, run.config
    sync, on_gpu = sync_of(run, device), runs_ahead(device)
    has_graph = is_recorded(run, sync, on_gpu=on_gpu, is_timed=recorder is not None)
    mesh = make_mesh(run, rank, alone=strategy is not None, shards=shards)
    trained = make_trained(run, rank, device)
    if strategy is None:
        strategy = _make_strategy(run, mesh, trained, recorded)
    if mesh.shards.size > 1:
        run.job.share_models(trained.models, mesh.shards)
    compressor = None
    if config.strategy == "synchronous":
        compressor = make_compressor(config, Exchange(mesh.teammates), trained.parameters())
    reducer = GradientReducer(
        trained.stage_modules,
        mesh.groups.summed,
        layout.num_microbatches,
        sync,
        None if recorder is None else partial(recorder.enter, "all-reduce"),
        compressor,
        mesh.groups.shards,
    )
    stopwatch = Stopwatch(make_clock(device))
    scale = trained.loss_scale
    pipeline = Pipeline(
        trained.stage_modules,
        reducer.modules,
        layout.stages_of(rank),
        layout,
        device,
        mesh.groups.pipeline,
        run.job.loss(None if scale is None else scale.factor),
        partial(send, device=device),
        recorder,
        stopwatch,
    )
    if has_graph:
        # The loss of a full step is the mean of its team's samples.
        pipeline.record_steps(record_graph, run.batch_size // run.batch_layout.num_teams)
    scorers, merged = mesh.teammates, None
    if isinstance(strategy, Subnetworks):
        rows = strategy.wide_rows
        merged = _merged(run, mesh, rows, pipeline)
        if run.job.merges_whole:
            scorers = rows.across_teams
    needs = Needs(
        run.batch_layout,
        0 if run.has_subnetworks else mesh.replica_index,
        device,
        run.dtype,
        has_first=pipeline.has_first,
        has_last=pipeline.has_last,
        shards=mesh.shards,
    )
    return RankState(
        run=run,
        device=device,
        mesh=mesh,
        trained=trained,
        strategy=strategy,
        feed=run.job.feed(needs),
        pipeline=pipeline,
        reducer=reducer,
        scorers=scorers,
        merged=merged,
        writes_files=mesh.replica_index == layout.writer,
        recorder=recorder,
        stopwatch=stopwatch,
        runs_ahead=on_gpu and config.opt in SKIPPING,
    )


def _make_strategy(
    run: Run, mesh: Mesh, trained: Trained, recorded: Sequence[Recorded] | None
) -> Strategy:
    names = {id(b): name for model in trained.models for name, b in model.named_buffers()}
    running = {names[id(statistic)]: statistic for statistic in trained.statistics.running}
    return make_strategy(
        run.config,
        run.course,
        position_in(run, mesh, trained.statistics),
        Weights(trained.parameters(), running),
        recorded,
        partial(describe_wide, run, trained.models, trained.optimizer),
    )


def _merged(run: Run, mesh: Mesh, rows: WideRows, pipeline: Pipeline) -> Merged:
    stage_indices, device = run.layout.stages_of(mesh.rank), pipeline.device
    stages = cut_stages(run.make_wide_model, run.plan, stage_indices)
    if run.job.merges_whole:
        stages = [stage.to(run.dtype).to_empty(device=device) for stage in stages]
        modules = make_stage_modules(run, stages, device)
        facts = stage_indices, run.layout, device, mesh.groups.pipeline
        loss, to_device = run.job.loss(None), partial(send, device=device)
        pipeline = Pipeline(modules, modules, *facts, loss, to_device)
    columns = RankColumns(rows.across_teams)
    share = WideShare(rows.wide.slicing, rows.stored, rows.whole, columns, ROWS_AT_ONCE)
    return run.job.merged(stages, share, pipeline)
