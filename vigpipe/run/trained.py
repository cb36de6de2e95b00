"""What one rank trains: its stages of the model, and all that follows their weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.scheduler import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from vigpipe.model.compiled import compile_blocks
from vigpipe.model.norm import PooledStatistics
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.parallel.split import StageModule, cut_stages
from vigpipe.run.facts import Run
from vigpipe.run.loss_scale import LossScale
from vigpipe.run.optimizer import make_optimizer


@dataclass
class Trained:
    """What a rank trains."""

    models: list[StagedModel]  # its stages, with parameters under the names of the unsplit model
    stage_modules: list[StageModule]  # what runs these on micro-batches
    statistics: PooledStatistics
    optimizer: torch.optim.Optimizer
    lr_schedule: Any  # timm's, counted in optimizer steps
    ema: ModelEmaV3 | None  # timm's moving average of `models`
    loss_scale: LossScale | None  # only in float16

    @property
    def lr(self) -> float:
        """Learning rate of the last step, for the last layer."""
        group = self.optimizer.param_groups[0]
        return group["lr"] / group["lr_scale"]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained by their names in the unsplit model."""
        return {n: p for m in self.models for n, p in m.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """Return the entries of the unsplit model's state dict."""
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

    def update_average(self) -> None:
        """Let the moving average follow the weights, after a step that was taken."""
        if self.ema is not None:
            self.ema.update(nn.ModuleList(self.models))

    def copy_from(self, rank: int, counterparts: Counterparts) -> None:
        """Take the weights, statistics and averages of the counterpart at a rank; all do so."""
        with counterparts.at_once():
            for tensor in (*self.state().values(), *self.average().values()):
                counterparts.copy_from(rank, tensor)

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
            weights = tensor.clone()
            tensor.copy_(averages[name])
            averages[name].copy_(weights)


def make_trained(run: Run, rank: int, device: torch.device) -> Trained:
    """Make what a rank trains, at the start of a run."""
    config, layout = run.config, run.layout
    models = cut_stages(run.build, run.plan, layout.stages_of(rank))
    stage_modules = make_stage_modules(run, models, device)
    # Copied before hooks are registered.
    ema = ModelEmaV3(nn.ModuleList(models), decay=config.ema) if config.ema else None
    if config.compile:
        for model in models:
            compile_blocks(model)
    optimizer = make_optimizer(config, _parameter_groups(run, models))
    return Trained(
        models,
        stage_modules,
        PooledStatistics(models, layout.num_microbatches),
        optimizer,
        _lr_schedule(run, optimizer),
        ema,
        LossScale(device) if run.autocast_dtype == torch.float16 else None,
    )


def make_stage_modules(
    run: Run, models: Sequence[StagedModel], device: torch.device
) -> list[StageModule]:
    """Make what runs a rank's stages on micro-batches, and move the stages to its device."""
    options = (run.dtype, run.autocast_dtype, run.boundary_dtype, run.num_recomputed)
    stage_modules: list[StageModule] = []
    for model in models:
        first, last = (run.job.rows_before(run.batch_layout, block) for block in model.span)
        ends = None if first == last == run.microbatch_size else (first, last)
        stage_module = StageModule(model, run.microbatch_size, run.job.row_shape, *options, ends)
        stage_modules.append(stage_module.to(device))
    return stage_modules


def _parameter_groups(run: Run, models: list[StagedModel]) -> list[dict[str, Any]]:
    """Group this rank's parameters by rate scale and weight decay."""
    rates = run.rates()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups.setdefault(rates[name], []).append(parameter)
    groups = groups or {(1.0, 0.0): []}  # all of this rank's stages are frozen
    return [
        {"params": parameters, "lr_scale": scale, "weight_decay": decay}  # timm reads lr_scale
        for (scale, decay), parameters in groups.items()
    ]


def _lr_schedule(run: Run, optimizer: torch.optim.Optimizer) -> Any:
    # timm counts epochs; an "epoch" of one update makes it count optimizer steps.
    config = run.config
    warmup = (config.warmup_epochs or 0) * run.steps_per_epoch
    warmup = -(-warmup // run.num_subnetworks)  # Sub-networks share the epochs of the warm-up.
    warmup = min(warmup, run.num_steps // 2)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="cosine" if config.lr_schedule == "cosine" else "step",
        num_epochs=run.num_steps,
        decay_epochs=1,
        decay_rate=1.0,  # A step schedule is then constant after the warm-up.
        min_lr=config.min_lr or 0.0,
        warmup_lr=config.warmup_lr,
        warmup_epochs=warmup,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule
