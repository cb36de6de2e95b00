"""One rank's share of a job: its parts of the model, its optimizer, and one training step."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from vigpipe.data.ahead import Reader
from vigpipe.data.mix import Mix
from vigpipe.data.shards import ReplicaBatch
from vigpipe.job import Job
from vigpipe.loss import Loss
from vigpipe.model.graph import collected_anomalies
from vigpipe.model.norm import PooledStatistics
from vigpipe.model.regions import listening
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.clip import clip_gradients
from vigpipe.parallel.exchange import Agreement, Status, agree, everyone
from vigpipe.parallel.launch import PATIENCE_SECONDS
from vigpipe.parallel.mesh import make_groups
from vigpipe.parallel.replicate import Replicas
from vigpipe.parallel.schedule import Pipeline
from vigpipe.parallel.split import Part, cut_parts
from vigpipe.spans import Kind
from vigpipe.timing.clock import Stopwatch, make_clock
from vigpipe.timing.recorder import Phase, Recorder


@dataclass
class Worker:
    """What a rank holds.

    Attributes:
        job: the run.
        device: where this rank computes.
        replica_index: its replica.
        stage_index: its position in the pipeline.
        stage_group: the ranks of its pipeline; None where there is one stage.
        models: its parts of the model, by the names of the unsplit one.
        pipeline: runs micro-batches through the stages.
        replicas: adds gradients up.
        statistics: pools BatchNorm's running statistics.
        optimizer: of this rank's parameters.
        lr_schedule: timm's, in optimizer steps.
        reader: reads images, ahead of time if there are workers.
        mix: mixes samples and smooths labels; None where neither is on.
        ema: timm's moving average of `models`; None where it is off.
        recorder: of this rank's time; None where nobody asks for it.
        stopwatch: of its forwards and backwards.
        status: what this rank will tell the others in the next step.
        agreement: what all ranks told in the last one.
        step: optimizer steps done, skipped ones among them.
    """

    job: Job
    device: torch.device
    replica_index: int
    stage_index: int
    stage_group: dist.ProcessGroup | None
    models: list[StagedModel]
    pipeline: Pipeline
    replicas: Replicas
    statistics: PooledStatistics
    optimizer: torch.optim.Optimizer
    lr_schedule: Any
    reader: Reader
    mix: Mix | None
    ema: ModelEmaV3 | None
    recorder: Recorder | None
    stopwatch: Stopwatch
    status: Status = field(default_factory=Status)
    agreement: Agreement = field(default_factory=lambda: Agreement([Status()]))
    step: int = 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files: the last stage of replica 0."""
        return self.replica_index == 0 and self.pipeline.has_last

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the last layer."""
        group = self.optimizer.param_groups[0]
        return group["lr"] / group["lr_scale"]

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the unsplit model."""
        return {name: p for model in self.models for name, p in model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """This rank's part of the unsplit model's state dict."""
        return {k: v for model in self.models for k, v in model.state_dict().items()}

    def average(self) -> dict[str, Tensor]:
        """The moving average of `state`, by the same names; empty where it is off."""
        if self.ema is None:
            return {}
        return {k: v for model in self.ema.module for k, v in model.state_dict().items()}

    def start_at(self, step: int) -> None:
        """Go on after some steps of an earlier run, whose state this rank has been given."""
        self.step = step
        if step:
            self.lr_schedule.step_update(step)

    def enter(self, kind: Kind) -> None:
        """Tell the recorder what begins."""
        if self.recorder is not None:
            self.recorder.enter(kind)

    @contextmanager
    def timed(self, phase: Phase, number: int) -> Iterator[None]:
        """Let the recorder see a step, or a batch of an evaluation, by its number."""
        if self.recorder is None:
            yield
            return
        with self.recorder.step(phase, number), listening(self.recorder.region):
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in the place of the weights for a while."""
        assert self.ema is not None
        self._exchange(self.ema)
        try:
            yield
        finally:
            self._exchange(self.ema)

    def _exchange(self, ema: ModelEmaV3) -> None:
        # Value by value: DDP, gradient views and the optimizer hold on to the tensors themselves.
        averages = ema.module.state_dict()
        for name, tensor in nn.ModuleList(self.models).state_dict().items():
            average = averages[name]
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)


def make_worker(
    job: Job, rank: int, device: torch.device, recorder: Recorder | None = None
) -> Worker:
    """Build a rank's share. With several ranks the process group must exist.

    Args:
        job: the run.
        rank: position in the world.
        device: where to compute.
        recorder: is told what the rank does in the steps that it records.
    """
    layout, config = job.layout, job.config
    stage_group = replica_group = None
    if layout.world_size > 1:
        stage_group, replica_group = make_groups(layout, config.timeout or PATIENCE_SECONDS)

    part_indices = layout.parts_of(rank)
    models = cut_parts(job.build, job.plan, part_indices)
    rows = job.cut(0).rows
    autocast = config.dtype == "bfloat16"
    options = (job.dtype, autocast, job.boundary_dtype, job.num_recomputed)
    parts = [Part(model, rows, job.image_shape, *options).to(device) for model in models]

    holder = nn.ModuleList(models)
    ema = ModelEmaV3(holder, decay=config.ema) if config.ema else None  # a copy without any hooks
    if config.compile:
        for block in (block for model in models for block in model.numbered_blocks.values()):
            block.compile(dynamic=False)  # in place: names and shapes stay
    reducing = None if recorder is None else partial(recorder.enter, "all-reduce")
    replicas = Replicas(parts, replica_group, config.sync, reducing)
    stopwatch = Stopwatch(make_clock(device))
    pipeline = Pipeline(
        parts,
        replicas.modules,
        part_indices,
        layout,
        device,
        stage_group,
        Loss(),
        recorder,
        stopwatch,
    )
    assert config.opt is not None
    # One pass over weights, gradients and moments, where torch has it.
    fused: dict[str, Any] = {"fused": True} if config.opt in ("adam", "adamw", "sgd") else {}
    optimizer = create_optimizer_v2(
        _parameter_groups(job, models), opt=config.opt, lr=config.lr, weight_decay=0.0, **fused
    )
    return Worker(
        job=job,
        device=device,
        replica_index=layout.replica_index(rank),
        stage_index=layout.stage_index(rank),
        stage_group=stage_group if layout.num_stages > 1 else None,
        models=models,
        pipeline=pipeline,
        replicas=replicas,
        statistics=PooledStatistics(models),
        optimizer=optimizer,
        lr_schedule=_lr_schedule(job, optimizer),
        reader=Reader((job.source.train, job.source.test), config.workers),
        mix=_mix(job),
        ema=ema,
        recorder=recorder,
        stopwatch=stopwatch,
    )


def _parameter_groups(job: Job, models: list[StagedModel]) -> list[dict[str, Any]]:
    """This rank's parameters, those of the same rate and weight decay together."""
    rates = job.rates()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            groups.setdefault(rates[name], []).append(parameter)
    return [
        {"params": parameters, "lr_scale": scale, "weight_decay": decay}  # timm's schedules scale
        for (scale, decay), parameters in groups.items()
    ]


def _mix(job: Job) -> Mix | None:
    config, source = job.config, job.source
    rates = config.mixup or 0.0, config.cutmix or 0.0, config.smoothing or 0.0
    if not any(rates):
        return None
    return Mix(*rates, source.num_classes, source.image_size, config.seed)


def _lr_schedule(job: Job, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401
    # timm counts epochs; an "epoch" of one update makes it count optimizer steps.
    config = job.config
    warmup = min((config.warmup_epochs or 0) * job.steps_per_epoch, job.num_steps // 2)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="cosine" if config.lr_schedule == "cosine" else "step",
        num_epochs=job.num_steps,
        decay_epochs=1,
        decay_rate=1.0,  # a step schedule that does not decay is constant after the warm-up
        min_lr=config.min_lr or 0.0,
        warmup_lr=config.warmup_lr,
        warmup_epochs=warmup,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule


def train_step(worker: Worker, batch: ReplicaBatch) -> float | None:
    """One optimizer step on the global batch.

    Returns:
        The loss over the global batch on ranks of the last stage, else None.
    """
    busy_seconds = worker.stopwatch.restart()  # of the step before, which a GPU has done by now
    worker.replicas.gradients.clear()
    losses = worker.pipeline.train_step(batch)  # forward and backward of every micro-batch
    worker.enter("all-reduce")
    worker.replicas.gradients.add_up()
    worker.enter("other")
    loss, moments = _gathered(worker, losses)
    # All ranks take part, or none: a step that is not a finite number changes nothing.
    told = worker.status._replace(finite=_is_finite(worker, loss), busy_seconds=busy_seconds)
    world_size = worker.job.layout.world_size
    if world_size > 1:
        worker.enter("wait end")
    worker.agreement = agree(told, world_size, worker.device)
    worker.enter("other")
    if worker.agreement.finite:
        _update(worker, moments)
    worker.step += 1
    worker.lr_schedule.step_update(worker.step)
    return loss


def find_anomaly(worker: Worker, batch: ReplicaBatch) -> str:
    """Run a step's forwards and backwards once more, and say where numbers cease to be finite.

    Every rank calls this and gets the same sentence.
    """
    for model in worker.models:
        model.set_detect_anomaly(True)
    worker.replicas.gradients.clear()
    with collected_anomalies() as found:
        worker.pipeline.train_step(batch)
    worker.statistics.take(worker.job.layout.num_microbatches)
    for model in worker.models:
        model.set_detect_anomaly(worker.job.config.detect_anomaly)
    first = [
        message
        for messages in everyone(found[:1], worker.job.layout.world_size)
        for message in messages
    ]
    if not first:
        return "the features of all blocks are finite, so look at the readout and the gradients"
    return min(first, key=lambda message: int(re.findall("[0-9]+", message)[0]))


def _is_finite(worker: Worker, loss: float | None) -> bool:
    gradients = [p.grad for p in worker.parameters().values() if p.grad is not None]
    largest = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf)
    return math.isfinite(largest) and (loss is None or math.isfinite(loss))


def _update(worker: Worker, moments: Tensor) -> None:
    worker.statistics.update(moments)
    if worker.job.config.clip is not None:
        clip_gradients(
            worker.parameters(),
            worker.job.parameter_order,
            worker.job.config.clip,
            worker.stage_group,
        )
    worker.enter("optimizer")
    worker.optimizer.step()
    worker.enter("other")
    if worker.ema is not None:
        worker.ema.update(nn.ModuleList(worker.models))


def _gathered(worker: Worker, losses: Tensor | None) -> tuple[float | None, Tensor]:
    """The loss over the global batch, and BatchNorm's moments of all its D * M micro-batches."""
    # One small exchange a step: BatchNorm's moments and, from the last stage, the losses of the
    # micro-batches.
    num_microbatches = worker.job.layout.num_microbatches
    moments = worker.statistics.take(num_microbatches).flatten()
    own = moments if losses is None else torch.cat((moments.to(losses), losses))
    everyones = worker.replicas.gather(own)  # (D, moments + M)
    pooled = everyones[:, : len(moments)].unflatten(
        1, (num_microbatches, 3, worker.statistics.num_channels)
    )
    moments_of_all = pooled.flatten(0, 1)  # (D * M, 3, channels)
    if losses is None:
        return None, moments_of_all
    # In the order of the D x M micro-batches, which is the same for every layout.
    return float(everyones[:, len(moments) :].flatten().sum()), moments_of_all
