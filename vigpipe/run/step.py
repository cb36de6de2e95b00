"""One optimizer step on the global batch, as every rank takes it.

A CPU has done its work when a call returns. A GPU is only handed work, does it later, and stands
still when it has none. So the host of a GPU never waits for a number of the step that it hands out;
it reads those of the step before, of which the ranks have agreed that all of them have come:

    host   step 7: forwards, backwards, sums | agree, complete step 6 | optimizer | step 8: ...
    GPU    ... step 6 .........................................| step 7 ......................

Whether step 7 is taken, because all numbers of all ranks are finite, is then decided on the device.
What the host does once it knows (BatchNorm's running statistics, the moving average, the row of the
record) it does one step later, with the same results.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vigpipe.launch.device import ToHost
from vigpipe.parallel.abort import abort_collectives
from vigpipe.parallel.agreement import NOTHING_WANTED, Status, agree, becomes_true, holds_everywhere
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.clip import clip_gradients
from vigpipe.replication.strategy import Computed, Pushed
from vigpipe.run.rank import HandedStep, RankState

# How long a GPU may take for what it was given before its collectives were aborted.
SETTLE_SECONDS = 10.0


def train_step(
    rank_state: RankState, batch: ReplicaBatch, wishes: Callable[[], Status] = Status
) -> HandedStep:
    """Take one optimizer step on the global batch; every rank calls this.

    What the rank wishes besides is asked for when it has done its work.

    The step is complete if the rank does not run ahead of its device; otherwise the one before is.
    """
    config, peers, trained = rank_state.run.config, rank_state.strategy.peers, rank_state.trained
    rank_state.stopwatch.begin()
    trained.follow_schedule(batch.step)
    rank_state.reducer.gradients.clear()
    losses = rank_state.pipeline.train_step(batch)  # forward and backward of every micro-batch
    rank_state.enter("all-reduce")
    rank_state.reducer.gradients.reduce()
    rank_state.enter("other")
    gradients = [p.grad for p in trained.parameters().values() if p.grad is not None]
    scale = trained.loss_scale
    if scale is not None:
        losses = None if losses is None else losses / scale.factor
        scale.unscale(gradients)
    loss, stats = _gather_loss_and_stats(rank_state, losses)
    is_finite = _is_finite(gradients, loss)
    stats, may_take, is_own = rank_state.strategy.combine_gradients(
        Computed(gradients, stats, is_finite, batch.num_samples, batch.is_trained, loss)
    )
    if is_own:
        _clip(rank_state)

    # All ranks take the step, or none does: one that is not finite changes nothing. And nothing
    # changes before all ranks have agreed, because a rank that loses its peer until then saves its
    # state as that of the step before (`checkpoint.rescue`).
    status = wishes()._replace(
        empty=not batch.is_trained,
        busy_seconds=rank_state.busy_seconds,
        data_seconds=rank_state.data_seconds,
    )
    all_finite = is_finite
    if rank_state.runs_ahead:
        all_finite = holds_everywhere(is_finite, peers)
    else:
        status = status._replace(finite=bool(is_finite))
    if peers.size > 1:
        rank_state.enter("wait end")
    agreement = agree(
        status, peers, until=rank_state.has_open_step_come, timeout_seconds=config.timeout
    )
    rank_state.enter("other")
    _complete_step(rank_state)  # the one before, which has come
    if not rank_state.runs_ahead:
        all_finite = torch.full_like(is_finite, agreement.finite)
    is_taken = all_finite if may_take is None else may_take
    if may_take is None and agreement.empty:
        is_taken = torch.zeros_like(is_taken)
    rank_state.reducer.end_step(is_taken)
    rank_state.enter("optimizer")
    if rank_state.runs_ahead:
        # The fused optimizers of torch read this number on the device: unless it is 0, they change
        # nothing.
        optimizer: Any = trained.optimizer
        optimizer.found_inf = is_taken.logical_not().float()
    if is_own and (rank_state.runs_ahead or is_taken):
        trained.optimizer.step()
    rank_state.enter("other")
    rank_state.step += 1

    one = torch.ones_like(is_taken, dtype=torch.float64)
    factor = one if scale is None else scale.factor.double()
    numbers = one if loss is None else loss, all_finite.double(), is_taken.double(), factor
    outcome = torch.stack(numbers)
    if scale is not None:
        scale.update(all_finite)
    lap = rank_state.stopwatch.lap()
    step = HandedStep(batch.step + 1, trained.lr, agreement, stats, ToHost(outcome), lap)
    rank_state.open_step = step
    if not rank_state.runs_ahead:
        _complete_step(rank_state)
    return step


def apply_gradients(rank_state: RankState, pushed: Pushed) -> float:
    """Take a step with gradients that are in place; return its rate. A pipeline's ranks all do."""
    trained = rank_state.trained
    groups = trained.optimizer.param_groups
    trained.follow_schedule(pushed.step)
    rates = [group["lr"] for group in groups]
    if pushed.damping != 1:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * pushed.damping
    lr = trained.lr
    _clip(rank_state)
    trained.optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    shape = rank_state.run.layout.num_microbatches, 3, trained.statistics.num_channels
    trained.statistics.update(pushed.stats.view(shape))
    trained.update_average()
    rank_state.step = pushed.step + 1
    return lr


def complete_step(rank_state: RankState) -> None:
    """Complete the step that the device is busy with; every rank does, before its state is read."""
    if rank_state.open_step is not None:
        timeout, has_come = rank_state.run.config.timeout, rank_state.has_open_step_come
        agree(NOTHING_WANTED, rank_state.strategy.peers, has_come, timeout)  # notices a lost peer
        _complete_step(rank_state)


def _complete_step(rank_state: RankState) -> None:
    step = rank_state.open_step
    if step is None:
        return
    rank_state.open_step = None
    loss, is_finite, is_taken, step.loss_factor = step.outcome.read()
    step.loss = loss if rank_state.pipeline.has_last else None
    step.is_finite, step.is_taken = bool(is_finite), bool(is_taken)
    rank_state.num_not_finite += not step.is_finite
    step.seconds, step.busy_seconds = step.lap.seconds(), step.lap.busy_seconds()
    rank_state.busy_seconds = step.busy_seconds
    if step.is_taken:
        rank_state.trained.statistics.update(step.stats)
        rank_state.trained.update_average()
    step.is_complete = True


def _clip(rank_state: RankState) -> None:
    clip, order = rank_state.run.config.clip, rank_state.run.parameter_order
    if clip is not None:
        parameters, group = rank_state.trained.parameters(), rank_state.mesh.groups.pipeline
        clip_gradients(parameters, order, clip, group, rank_state.device)


def settle_after_loss(rank_state: RankState) -> bool:
    """Go to the end of a whole step after a collective has failed; say if that can be saved."""
    if not rank_state.runs_ahead:
        return True
    abort_collectives((rank_state.mesh.groups.pipeline, rank_state.reducer.group))
    if not becomes_true(rank_state.has_open_step_come, SETTLE_SECONDS):
        return False
    step = rank_state.open_step
    _complete_step(rank_state)
    if step is not None and not step.is_taken:
        rank_state.step -= 1  # cut short; or not finite, which it will be once more
    return True


def _gather_loss_and_stats(
    rank_state: RankState, losses: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Gather the loss of the global batch, and BatchNorm's statistics of its D * M micro-batches.

    One small exchange a step carries both. The losses are each micro-batch's share, (M,) float64,
    on ranks of the last stage, and so is the loss, a scalar; the others are (D * M, 3, channels).
    """
    num_microbatches = rank_state.run.layout.num_microbatches
    stats = rank_state.trained.statistics.take().flatten()
    own = stats if losses is None else torch.cat((stats, losses))
    by_rank = rank_state.reducer.gather(own)  # (D * m, stats + M)
    # Ranks that share a batch have the same statistics, those of all its rows.
    stats_by_replica = by_rank[:: rank_state.mesh.shards.size, : len(stats)].unflatten(
        1, (num_microbatches, 3, rank_state.trained.statistics.num_channels)
    )
    all_stats = stats_by_replica.flatten(0, 1)  # (D * M, 3, channels)
    if losses is None:
        return None, all_stats
    # Summed in the order of the D * M micro-batches, which is the same for every layout.
    return by_rank[:, len(stats) :].flatten().sum(), all_stats


def _is_finite(gradients: list[Tensor], loss: Tensor | None) -> Tensor:
    """Tell on the device whether this rank's gradients, and the loss if it knows it, are finite."""
    is_finite = nn.utils.get_total_norm(gradients, norm_type=math.inf).isfinite()
    return is_finite if loss is None else is_finite & loss.isfinite()
