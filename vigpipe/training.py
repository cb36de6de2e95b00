"""A training run from top to bottom: the loop, and the step that it repeats.

The way of one batch: `data.batches.replica_batches` reads a replica's share of a step (called by
`run.batches.batches`), `train_step` runs it through `parallel.schedule.Pipeline`, which takes every
micro-batch through `parallel.split.StageModule`; `parallel.gradients` sums the gradients over the
replicas, all ranks agree whether every number is finite, and the optimizer steps. `run.record`
keeps the row, and `checkpoint.checkpoints` now and then the state.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from vigpipe.analysis.run_timing import (
    describe,
    gather_timing,
    make_recorder,
    where_the_rest_is,
    write_timing,
)
from vigpipe.checkpoint.checkpoints import Checkpoints
from vigpipe.checkpoint.resume import resume
from vigpipe.checkpoint.weights_file import save_run_weights
from vigpipe.config.files import as_toml
from vigpipe.config.interval import parse_interval
from vigpipe.data.batches import ReplicaBatch
from vigpipe.errors import DONE, SAVED, InputError
from vigpipe.launch.device import synchronize
from vigpipe.launch.failures import is_lost_peer
from vigpipe.messages import one_line
from vigpipe.parallel.agreement import (
    NOTHING_WANTED,
    Agreement,
    Status,
    agree,
    all_gather_values,
    run_with_heartbeats,
)
from vigpipe.parallel.clip import clip_gradients
from vigpipe.run.anomaly import find_anomaly
from vigpipe.run.batches import batches
from vigpipe.run.evaluation import Scores, evaluate_all
from vigpipe.run.facts import Run
from vigpipe.run.folder import AVERAGED_WEIGHTS, WEIGHTS
from vigpipe.run.progress import RunProgress
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.record import RunRecord
from vigpipe.run.stop_and_save import SaveAndStop, parse_stop_before
from vigpipe.run.stragglers import Stragglers
from vigpipe.run.summary import summarize
from vigpipe.timing.clock import read_clocks

MAX_SKIPPED = 10  # steps in a row; after that, skipping does not help


def train(run: Run, rank: int, device: torch.device, folder: Path) -> int:
    """Train as one rank; the rank that knows the loss writes the run's files.

    Args:
        run: what to train, in which layout.
        rank: position in the world.
        device: where this rank computes.
        folder: of the run's files.

    Returns:
        SAVED if the run was asked to stop and has left a checkpoint, else DONE.

    Raises:
        FloatingPointError: a step is not finite, and --on-nan is stop or has not helped.
    """
    started, config = time.perf_counter(), run.config
    stop_at = parse_stop_before(config.stop_before, os.environ)
    save_and_stop = SaveAndStop(
        parse_interval("--checkpoint-every", config.checkpoint_every),
        run.num_steps,
        stop_at,
        has_peers=run.layout.world_size > 1,
        timeout_seconds=config.timeout or math.inf,
    )
    rank_state = make_rank_state(run, rank, device, make_recorder(run, rank, device))
    # By default rich believes $FORCE_COLOR, and draws a bar into the logs of CI and notebooks.
    console = Console(
        quiet=not rank_state.is_writer,
        force_terminal=sys.stdout.isatty(),
        soft_wrap=True,
        highlight=False,
    )

    def log(sentence: str) -> None:
        """Tell the user a sentence, on one line."""
        console.print(one_line(sentence), markup=False)

    log(f"{config.model} on {run.source.name}: {run.layout}, {device}, {folder}")
    for note in run.notes:
        log(note)
    resumed = resume(rank_state, folder, log)
    progress = RunProgress(console, run.num_steps, rank_state.step, config.log_every)

    def open_record() -> RunRecord | None:
        """Open the files of the run, and its tracker, whose server may be far away."""
        if not rank_state.is_writer:
            return None
        return RunRecord(folder, as_toml(config), rank_state.step, log, config.track)

    record = run_with_heartbeats(open_record, run.layout.world_size)
    checkpoints = Checkpoints(rank_state, folder, log, resumed)
    stragglers = Stragglers(run.layout)
    clocks = read_clocks() if rank_state.recorder is not None else []  # again when all is recorded

    def announce(event: str, message: str) -> None:
        """Record an event beside the steps, and tell the user."""
        if record is not None:
            record.add_event(event, rank_state.step, message)
        log(message)

    def evaluate_now() -> Scores:
        """Score the weights, and their moving average if there is one."""
        with save_and_stop.patient():
            scores = evaluate_all(rank_state)
        if record is not None and scores.test is not None:
            epoch = -(-rank_state.step // run.steps_per_epoch)
            training_loss = record.add_evaluation(epoch, scores.as_row())
            told = "" if training_loss is None else f"training loss {training_loss:.4f}; "
            log(f"epoch {epoch}: {told}{scores}")
        progress.resume()
        return scores

    scores: Scores | None = None
    loss: float | None = None
    num_skipped = 0  # steps in a row
    is_evaluated = True  # whether the evaluation that is due after the last step has been done
    if resumed is not None:
        loss, is_evaluated = resumed.loss, resumed.evaluated
        if record is not None:
            text = f"from a checkpoint of {resumed.layout['text']}"
            record.add_event("resumed", rank_state.step, text)

    def save_now() -> None:
        """Begin a checkpoint of the last step, once the rows that it counts on are on disk."""
        if record is not None:
            record.sync()
        checkpoints.save(loss, is_evaluated)
        save_and_stop.saved()

    def save_for_lost_peer() -> None:
        with save_and_stop.patient():
            checkpoints.rescue(loss, is_evaluated)

    with nullcontext() if record is None else closing(record):
        with save_and_stop, _on_lost_peer(rank_state, save_for_lost_peer), progress:
            if not is_evaluated:
                scores, is_evaluated = evaluate_now(), True
                if checkpoints.is_best(scores):
                    save_now()
            for epoch, batch, is_evaluation_due in batches(rank_state):
                status = Status(
                    stop=save_and_stop.is_stop_due(),
                    save=rank_state.is_writer and save_and_stop.is_save_due(rank_state.step + 1),
                )
                lr, step_started = rank_state.lr, time.perf_counter()
                with rank_state.timed("train", rank_state.step + 1):
                    loss, agreement = train_step(rank_state, batch, status)
                synchronize(device)
                seconds = time.perf_counter() - step_started

                num_skipped = 0 if agreement.finite else num_skipped + 1
                if num_skipped:
                    loss = None
                    announce("skipped", _explain_skipped(rank_state, batch, num_skipped))
                elif record is not None and loss is not None:
                    record.add_step(rank_state.step, epoch, loss, lr, seconds, batch.num_samples)
                    progress.add(rank_state.step, epoch, loss, lr, batch.num_samples)
                for straggler in stragglers.add(agreement.busy_seconds):
                    announce("straggler", str(straggler))

                is_evaluated, is_best = not is_evaluation_due, False
                if is_evaluation_due and not agreement.stop:
                    scores, is_evaluated = evaluate_now(), True
                    is_best = checkpoints.is_best(scores)
                if agreement.save or agreement.stop or is_best:
                    with save_and_stop.patient():
                        save_now()
                if agreement.stop:
                    save_and_stop.leaves = True
                    with save_and_stop.patient():
                        return _stop(rank_state, checkpoints, save_and_stop.why, log)

        if scores is None:  # the checkpoint was of the last step
            scores = evaluate_all(rank_state)
        rank_state.reader.close()
        timing = gather_timing(rank_state, clocks) if rank_state.recorder is not None else None
        save_run_weights(rank_state, folder / WEIGHTS)
        if rank_state.ema is not None:
            with rank_state.averaged():
                save_run_weights(rank_state, folder / AVERAGED_WEIGHTS)
        checkpoints.finish()
        if record is None:
            return DONE
        summary = summarize(rank_state, scores, loss, started)
        if resumed is not None:
            summary["resumed_at_step"] = resumed.step
        if checkpoints.best is not None:
            summary["best"] = checkpoints.best.as_table()
            log(f"best at step {checkpoints.best.step}: {checkpoints.best}, which chose it")
        if timing is not None:
            summary["timing"] = timing.summary()
        record.finish(summary)
        if timing is not None:
            write_timing(timing, run, folder, device)
            tables = f"{describe(timing)}\n\n{where_the_rest_is(folder, config.trace)}"
            console.print(tables, markup=False)
        log(f"weights and metrics in {folder}")
        return DONE


class StepResult(NamedTuple):
    """What one optimizer step found.

    Attributes:
        loss: over the global batch, on ranks of the last stage; else None.
        agreement: what all ranks said before they stepped their optimizers.
    """

    loss: float | None
    agreement: Agreement


def train_step(
    rank_state: RankState, batch: ReplicaBatch, status: Status = NOTHING_WANTED
) -> StepResult:
    """Take one optimizer step on the global batch; every rank calls this.

    Args:
        rank_state: this rank's state, which the step changes.
        batch: this replica's share of the global batch.
        status: what this rank tells the others; whether its numbers are finite and how long it
            has worked are filled in here.
    """
    busy_seconds = rank_state.stopwatch.restart()  # of the step before, which a GPU has done by now
    rank_state.replicas.gradients.clear()
    losses = rank_state.pipeline.train_step(batch)  # forward and backward of every micro-batch
    rank_state.enter("all-reduce")
    rank_state.replicas.gradients.reduce()
    rank_state.enter("other")
    loss, moments = _gather_loss_and_moments(rank_state, losses)

    # All ranks step, or none does: a step that is not finite changes nothing.
    status = status._replace(finite=_is_finite(rank_state, loss), busy_seconds=busy_seconds)
    world_size = rank_state.run.layout.world_size
    if world_size > 1:
        rank_state.enter("wait end")
    agreement = agree(status, world_size, rank_state.device)
    rank_state.enter("other")
    if agreement.finite:
        _update(rank_state, moments)
    rank_state.step += 1
    rank_state.lr_schedule.step_update(rank_state.step)
    return StepResult(loss, agreement)


def _gather_loss_and_moments(
    rank_state: RankState, losses: Tensor | None
) -> tuple[float | None, Tensor]:
    """Gather the loss of the global batch, and BatchNorm's moments of its D * M micro-batches.

    One small exchange a step carries both.

    Args:
        rank_state: this rank's state.
        losses: (M,) float64, each micro-batch's share of the loss, on ranks of the last stage.

    Returns:
        The loss on ranks of the last stage, else None; the moments, (D * M, 3, channels).
    """
    num_microbatches = rank_state.run.layout.num_microbatches
    moments = rank_state.statistics.take(num_microbatches).flatten()
    own = moments if losses is None else torch.cat((moments.to(losses), losses))
    by_replica = rank_state.replicas.gather(own)  # (D, moments + M)
    moments_by_replica = by_replica[:, : len(moments)].unflatten(
        1, (num_microbatches, 3, rank_state.statistics.num_channels)
    )
    all_moments = moments_by_replica.flatten(0, 1)  # (D * M, 3, channels)
    if losses is None:
        return None, all_moments
    # Summed in the order of the D * M micro-batches, which is the same for every layout.
    return float(by_replica[:, len(moments) :].flatten().sum()), all_moments


def _is_finite(rank_state: RankState, loss: float | None) -> bool:
    gradients = [p.grad for p in rank_state.parameters().values() if p.grad is not None]
    largest = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf)
    return math.isfinite(largest) and (loss is None or math.isfinite(loss))


def _update(rank_state: RankState, moments: Tensor) -> None:
    """Clip the gradients, then change the rank's state: statistics, weights, moving average.

    Clipping is the last collective of the step. A rank that loses its peer there saves its state as
    that of the step before (`checkpoint.rescue`), so nothing of the state may change earlier.

    Args:
        rank_state: this rank's state, with the gradients of the global batch.
        moments: of BatchNorm in all micro-batches, (D * M, 3, channels).
    """
    config = rank_state.run.config
    if config.clip is not None:
        clip_gradients(
            rank_state.parameters(),
            rank_state.run.parameter_order,
            config.clip,
            rank_state.pipeline_group,
        )
    rank_state.statistics.update(moments)
    rank_state.enter("optimizer")
    rank_state.optimizer.step()
    rank_state.enter("other")
    if rank_state.ema is not None:
        rank_state.ema.update(nn.ModuleList(rank_state.models))


def _explain_skipped(rank_state: RankState, batch: ReplicaBatch, num_skipped: int) -> str:
    """Say what was wrong with a step in which no weight has changed; all ranks call this together.

    Raises:
        FloatingPointError: the run is to stop at such a step, or skipping does not help.
    """
    where = find_anomaly(rank_state, batch)
    why = f"step {rank_state.step}: the loss or a gradient is NaN or infinite; {where}"
    if rank_state.run.config.on_nan == "stop":
        raise FloatingPointError(
            f"{why}; lower --lr, bound the gradient with --clip 1, or leave such steps out with "
            "--on-nan skip"
        )
    if num_skipped == MAX_SKIPPED:
        raise FloatingPointError(
            f"{why}; {num_skipped} steps in a row were skipped, which does not help; lower --lr, "
            "or bound the gradient with --clip 1"
        )
    return f"{why}; skipped"


@contextmanager
def _on_lost_peer(rank_state: RankState, save: Callable[[], None]) -> Iterator[None]:
    """Save when a collective fails because a peer is gone: the replicas that are left are equal."""
    try:
        yield
    except RuntimeError as error:
        if rank_state.run.layout.num_replicas > 1 and is_lost_peer(error):
            save()
        raise


def _stop(
    rank_state: RankState, checkpoints: Checkpoints, why: str, log: Callable[[str], None]
) -> int:
    """Wait for the checkpoint and leave, all ranks at once: launchers end the others.

    Args:
        rank_state: this rank's state.
        checkpoints: one of this step has been begun.
        why: this rank was asked to stop; empty if it was not.
        log: is given a sentence for the user.

    Returns:
        SAVED.

    Raises:
        InputError: the checkpoint could not be written.
    """
    world_size = rank_state.run.layout.world_size
    rank_state.reader.close()
    run_with_heartbeats(checkpoints.finish, world_size)
    whys = [why for why in all_gather_values(why, world_size) if why]
    newest = max(all_gather_values(checkpoints.newest or 0, world_size))
    if newest != rank_state.step:
        raise InputError(
            f"asked to stop ({whys[0]}), but the checkpoint of step {rank_state.step} could not be "
            f"written to {checkpoints.folder}; make room, and go on from the newest with "
            "--resume auto"
        )
    log(
        f"stopped after step {rank_state.step} of {rank_state.run.num_steps} ({whys[0]}) with a "
        f"checkpoint in {checkpoints.folder}; go on with --resume auto"
    )
    return SAVED
