"""A training run from top to bottom.

The way of one batch: the run's strategy (`replication`) names the item that this rank takes a step
with. The job's feed (`data.feed`, `graphs.feed`) reads it, `run.step.train_step` runs it through
`parallel.schedule.Pipeline`, which takes every micro-batch through `parallel.split.StageModule`;
`parallel.gradients` sums the gradients over the replicas, all ranks agree whether every number is
finite, and the optimizer steps. `run.record` keeps the row, and `checkpoint.checkpoints` now and
then the state.
"""

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from vigpipe.analysis.run_timing import (
    describe,
    gather_timing,
    make_recorder,
    where_the_rest_is,
    write_timing,
)
from vigpipe.checkpoint.checkpoints import Checkpoints
from vigpipe.checkpoint.resume import check_same_options, read_same_data, resume
from vigpipe.checkpoint.weights_file import save_run_weights
from vigpipe.checkpoint.wide_run import save_wide_weights
from vigpipe.config.files import as_toml
from vigpipe.config.interval import parse_interval
from vigpipe.config.replication import balances_parts
from vigpipe.errors import DONE, SAVED, InputError, WorkerError
from vigpipe.job.batch import ReplicaBatch
from vigpipe.job.score import Scores
from vigpipe.launch.environment import FOLDER_VARIABLE
from vigpipe.launch.failures import is_lost_peer, note_met
from vigpipe.messages import one_line, tell
from vigpipe.parallel.agreement import (
    Peers,
    Status,
    agree,
    all_gather_values,
    run_with_heartbeats,
)
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.strategy import (
    AverageWeights,
    Evaluate,
    Finish,
    Lead,
    Leave,
    SkipGradients,
    TakeGradients,
    TakeItem,
)
from vigpipe.run.anomaly import find_anomaly
from vigpipe.run.batches import read_batch
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.events import open_events, read_events, take_over_events
from vigpipe.run.facts import Run
from vigpipe.run.folder import AVERAGED_WEIGHTS, WEIGHTS, lock
from vigpipe.run.others import Others
from vigpipe.run.progress import RunProgress
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.record import RunRecord, gradients_row, step_row
from vigpipe.run.settle import Kept, settle, share_evaluation, take_over_merged
from vigpipe.run.slow_data import SlowData
from vigpipe.run.step import (
    Step,
    apply_gradients,
    complete_step,
    settle_after_loss,
    train_step,
)
from vigpipe.run.stop_and_save import SaveAndStop, parse_stop_before
from vigpipe.run.stragglers import Stragglers
from vigpipe.run.summary import gather_accounts, gather_compression, gather_sent, summarize
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
        stop_at,
        has_peers=run.layout.world_size > 1,
        timeout_seconds=config.timeout or math.inf,
    )
    recorded = None
    if config.replay is not None:
        check_same_options(config.replay, run)
        recorded = None if balances_parts(config) else read_events(config.replay, run)
    rank_state = make_rank_state(run, rank, device, make_recorder(run, rank, device), recorded)
    strategy = rank_state.strategy
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

    log(f"{config.model} on {run.job.name}: {run.layout}, {device}, {folder}")
    for note in run.notes:
        log(note)
    resumed = resume(rank_state, folder, log)
    if config.replay is not None and balances_parts(config):
        read_same_data(rank_state, config.replay)
    progress = RunProgress(console, run.num_steps, rank_state.step, config.log_every, run.job.unit)

    def open_record() -> RunRecord | None:
        """Open the files of the run, and its tracker, whose server may be far away."""
        if not rank_state.is_writer:
            return None
        num_bytes = resumed.replicas.get("metrics_bytes") if resumed is not None else None
        return RunRecord(folder, as_toml(config), rank_state.step, log, config.track, num_bytes)

    record = run_with_heartbeats(open_record, run.layout.world_size)
    others: Others | None = None
    if record is not None and (inbox := strategy.inbox()) is not None:
        num_bytes = None if resumed is None else resumed.replicas["events_bytes"]
        others = Others(strategy, inbox, record, open_events(run, folder, num_bytes))
    checkpoints = Checkpoints(rank_state, folder, log, resumed)
    stragglers = Stragglers(run.layout.one_team)
    slow_data = SlowData(config.workers, runs_ahead=rank_state.runs_ahead, unit=run.job.unit)
    clocks = read_clocks() if rank_state.recorder is not None else []  # again when all is recorded

    def announce(event: str, message: str, step: int | None = None) -> None:
        """Record an event beside the steps, by default at the last one, and tell the user."""
        if record is not None:
            record.add_event(event, rank_state.step if step is None else step, message)
        log(message)

    def take_over() -> None:
        """Write the run's files from now on, after the replicas that did so were lost."""
        nonlocal record, others
        rank_state.leads = of_team == 0
        if not rank_state.is_writer:
            return
        console.quiet = False
        with contextlib.suppress(InputError):  # one that is frozen may still hold it
            lock(folder)
        checkpoints.lead()
        step, inbox = rank_state.step, strategy.inbox()
        assert inbox is not None
        record = RunRecord(folder, as_toml(config), step, log, config.track, takes_over=True)
        files.callback(record.close)
        events = take_over_events(run, folder, inbox.noted.get("events_bytes"))
        others = Others(strategy, inbox, record, events)

    def tell_lost() -> None:
        """Tell the user who was lost, on the rank that writes."""
        for replica in [] if others is None else others.newly_lost():
            num, what = run.layout.num_teams, "worker" if run.layout.has_server else "replica"
            left = f"{num - len(strategy.lost())} of {num}"
            announce("lost", f"{what} {replica} was lost; the run goes on with {left}")

    def evaluate_now(epoch: int) -> Scores:
        """Score the weights, and their moving average if there is one."""
        with save_and_stop.patient():
            if run.layout.has_server:
                scores = strategy.together(evaluate_shared)
            else:
                take_over_merged(rank_state)
                scores = evaluate_all(rank_state)
        return tell_scores(epoch, scores)

    def evaluate_shared(left: Counterparts) -> Scores:
        """Share the evaluation among all that are left."""
        share_evaluation(rank_state, left)
        return evaluate_all(rank_state)

    def tell_scores(epoch: int, scores: Scores) -> Scores:
        """Record an evaluation, and tell the user."""
        if record is not None and scores.test is not None:
            training_loss = record.add_evaluation(epoch, scores.as_row())
            told = "" if training_loss is None else f"training loss {training_loss:.4f}; "
            log(f"epoch {epoch}: {told}{scores}")
        progress.resume()
        return scores

    files = ExitStack()  # to close
    scores: Scores | None = None
    at_the_end: Kept | None = None
    loss: float | None = None
    num_skipped = 0  # steps in a row
    is_evaluated = True  # whether the evaluation that is due after the last step has been done
    if resumed is not None:
        loss, is_evaluated = resumed.loss, resumed.evaluated
        if record is not None:
            text = f"from a checkpoint of {resumed.layout['text']}"
            before = resumed.config.get("dp", 1)
            record.add_event("resumed", rank_state.step, text, replicas_before=before)

    team, of_team = run.layout.team_of(rank_state.replica_index)
    untold: deque[TrainedBatch] = deque()  # steps of which nothing has been told yet

    def wishes_after(step: int) -> Status:
        """Return what this rank wants after a step's index."""
        is_save_due = rank_state.is_writer and save_and_stop.is_save_due(step + 1)
        return Status(stop=save_and_stop.is_stop_due(), save=is_save_due)

    def take_gradients(turn: TakeGradients) -> None:
        """Take the step of a replica's gradients, and tell the user of it."""
        nonlocal loss
        lr = apply_gradients(rank_state, turn)
        strategy.hear(agree(wishes_after(turn.step), strategy.peers))
        loss = turn.loss
        if record is not None:
            size = *run.in_batches(turn.item), turn.num_samples
            rates = run.job.rates(*size, turn.seconds)
            record.add_step(gradients_row(turn, run.course, lr, rates))
            facts = turn.step + 1, run.course.epoch(turn.step), loss, lr
            progress.add(*facts, turn.num_samples, run.job.num_rows(*size))

    def take_step(turn: TakeItem) -> None:
        """Take the step of an item, and tell the user of all steps that are complete."""
        batch = read_batch(rank_state, turn)
        status = wishes_after(batch.step)
        with rank_state.timed("train", rank_state.step + 1, run.fill(turn.item)):
            step = train_step(rank_state, batch, status)
        untold.append(TrainedBatch(step, batch, turn.item))
        strategy.hear(step.agreement, is_full=run.fill(turn.item).is_full)
        tell_complete_steps()
        busy_seconds = step.agreement.busy_seconds
        for straggler in stragglers.add(busy_seconds):
            announce("straggler", str(straggler))
        measured = batch.step - (2 if rank_state.runs_ahead else 1)
        if told := rank_state.feed.hear(batch.step, measured, busy_seconds):
            announce("data", told)

    def tell_complete_steps() -> None:
        while untold and untold[0].step.is_complete:
            tell_step(untold.popleft())

    def tell_step(trained: TrainedBatch) -> None:
        """Record a complete step and show it, or explain why it was not taken."""
        nonlocal loss, num_skipped
        step, batch = trained.step, trained.batch
        if step.is_finite and not any(batch.sizes):  # of a partial batch, nothing for this replica
            return
        loss = step.loss if step.is_finite else None
        if not step.is_finite and step.loss_factor > 1 and _is_overflow(step, strategy.peers):
            announce("overflow", _explain_overflow(step), step.number)
            return
        num_skipped = 0 if step.is_finite else num_skipped + 1
        if num_skipped:
            why = _explain_skipped(rank_state, trained, num_skipped)
            announce("skipped", why, step.number)
        elif loss is not None and step.is_taken:
            facts = step.number, run.course.epoch(batch.step), loss, step.lr
            num_samples, waited = batch.num_samples, step.agreement.data_seconds
            whose = {} if strategy.sums_replicas else {"replica": team, "item": trained.item}
            size = *run.in_batches(trained.item), num_samples
            rates = run.job.rates(*size, step.seconds)
            row = step_row(*facts, step.seconds, rates, waited, **whose)
            if record is None:
                if of_team == 0 and rank_state.shards.place == 0:
                    strategy.note(row)
                return
            record.add_step(row)
            progress.add(*facts, num_samples, run.job.num_rows(*size))
            counts = run.fill(trained.item).is_full or not run.fill(0).is_full
            if counts and (why := slow_data.add(waited, step.seconds)):
                announce("data", why, step.number)

    def save_now() -> None:
        """Begin a checkpoint of the last step, once the rows that it counts on are on disk."""
        events_bytes = 0 if others is None else others.write()
        metrics_bytes = 0 if record is None else record.sync()
        checkpoints.save(loss, is_evaluated, metrics_bytes, events_bytes)
        save_and_stop.saved()

    def stop(_: Counterparts) -> int:
        """Save, wait for the checkpoint and leave, all ranks at once: launchers end the others.

        Returns:
            SAVED.

        Raises:
            InputError: the checkpoint could not be written.
        """
        if strategy.heads() and not rank_state.leads:
            take_over()
        save_now()
        run_with_heartbeats(checkpoints.finish, *strategy.peers)
        told = strategy.share([checkpoints.newest or 0, save_and_stop.why]).values()
        why = next((why for _, why in told if why), "a replica that is lost was asked to stop")
        if max(newest for newest, _ in told) != rank_state.step:
            raise InputError(
                f"asked to stop ({why}), but the checkpoint of step {rank_state.step} could not be "
                f"written to {checkpoints.folder}; make room, and go on from the newest with "
                "--resume auto"
            )
        log(
            f"stopped after step {rank_state.step} of {run.num_steps} ({why}) with a checkpoint in "
            f"{checkpoints.folder}; go on with --resume auto"
        )
        return SAVED

    def save_for_lost_peer() -> None:
        for trained in untold:  # the row of the state that is saved
            if trained.step.is_complete and trained.step.is_taken:
                tell_step(trained)
        with save_and_stop.patient():
            checkpoints.rescue(loss, is_evaluated)

    def save_without_store(error: StoreLostError) -> int:
        """Save what this replica has, since it cannot reach the others any more.

        Returns:
            SAVED.

        Raises:
            StoreLostError: it has nothing that the others have not, or could not write it.
        """
        if not strategy.outlives:
            raise error
        complete_step(rank_state)
        tell_complete_steps()
        if at_the_end is not None:
            at_the_end.restore()
        with save_and_stop.patient():
            is_saved = checkpoints.rescue(loss, is_evaluated, strategy.left_over())
        rank_state.feed.close()
        strategy.close()
        if not agree(Status(finite=is_saved), strategy.peers).finite:
            raise error
        if rank_state.pipeline.has_last and rank_state.shards.place == 0:
            who = "the server" if run.layout.has_server else f"replica {team}"
            tell(f"{error}; {who} has saved what it has; go on with --resume auto")
        return SAVED

    def finish(left: Counterparts) -> None:
        """Evaluate the weights that are kept, and write the results, with all that are left."""
        nonlocal scores
        if strategy.heads() and not rank_state.leads:
            take_over()
        tell_lost()
        if not strategy.sums_replicas:
            assert at_the_end is not None
            at_the_end.restore()
            if kept := settle(rank_state, left):
                log(kept)
            share_evaluation(rank_state, left)
            scores = tell_scores(run.course.epoch(run.num_steps - 1), evaluate_all(rank_state))
        if scores is None:  # the checkpoint was of the last step
            scores = evaluate_all(rank_state)
        accounts = None
        if not strategy.sums_replicas:
            accounts = gather_accounts(rank_state, share=strategy.share)
        compression, sent = gather_compression(rank_state), gather_sent(rank_state)
        timing = gather_timing(rank_state, clocks) if rank_state.recorder is not None else None
        save = save_run_weights if rank_state.rows is None else save_wide_weights
        save(rank_state, folder / WEIGHTS)
        if rank_state.ema is not None:
            with rank_state.averaged():
                save_run_weights(rank_state, folder / AVERAGED_WEIGHTS)
        checkpoints.finish()
        if record is None:
            return
        summary = summarize(rank_state, scores, loss, started, accounts, compression, sent)
        if resumed is not None:
            summary["resumed_at_step"] = resumed.step
        if checkpoints.best is not None:
            summary["best"] = checkpoints.best.as_table()
            log(f"best at step {checkpoints.best.step}: {checkpoints.best}, which chose it")
        if timing is not None:
            summary["timing"] = timing.summary()
        if others is not None:
            others.finish()
        record.finish(summary)
        if timing is not None:
            write_timing(timing, run, folder, device)
            tables = f"{describe(timing)}\n\n{where_the_rest_is(folder, config.trace)}"
            console.print(tables, markup=False)
        log(f"weights and metrics in {folder}")

    def take_turns() -> int:
        """Do what the strategy says, and then what is left to do; returns the exit code."""
        nonlocal scores, is_evaluated, at_the_end
        with _on_failure(rank_state, save_for_lost_peer), files:
            if record is not None:
                files.callback(record.close)
            with save_and_stop:  # to the end: SIGTERM must not end this rank while it saves
                with progress:
                    for turn in strategy.turns(rank_state.step, is_evaluated):
                        if isinstance(turn, TakeItem):
                            take_step(turn)
                            is_evaluated = not turn.is_evaluation_due
                            tell_lost()
                            continue
                        if isinstance(turn, TakeGradients):
                            take_gradients(turn)
                            tell_lost()
                            continue
                        if isinstance(turn, SkipGradients):
                            announce("skipped", _explain_late(turn), turn.step + 1)
                            continue
                        complete_step(rank_state)
                        tell_complete_steps()
                        if isinstance(turn, Evaluate):
                            scores, is_evaluated = evaluate_now(turn.epoch), True
                            if checkpoints.is_best(scores):
                                strategy.ask_to_save()
                        elif isinstance(turn, AverageWeights):
                            strategy.average_weights()
                        elif isinstance(turn, Finish):
                            run_with_heartbeats(checkpoints.finish, *strategy.peers)
                        elif isinstance(turn, Lead):
                            with contextlib.suppress(StoreLostError):  # all hear of it next
                                take_over()
                        elif isinstance(turn, Leave):
                            strategy.close()
                            rank_state.feed.close()
                            return DONE
                        else:
                            rank_state.step = turn.step
                            with save_and_stop.patient():
                                if turn.stop:
                                    save_and_stop.leaves = True
                                    code = strategy.together(stop)
                                    strategy.close()
                                    return code
                                save_now()
                at_the_end = Kept(rank_state)
                with save_and_stop.patient():
                    strategy.together(finish)
            rank_state.feed.close()
            strategy.close()
            return DONE

    if FOLDER_VARIABLE in os.environ:  # from here on, the others may be able to do without it
        note_met(Path(os.environ[FOLDER_VARIABLE]), rank)
    try:
        return take_turns()
    except StoreLostError as error:
        return save_without_store(error)


class TrainedBatch(NamedTuple):
    """A step with the batch that it was taken with, and the number of the item."""

    step: Step
    batch: ReplicaBatch
    item: int


def _is_overflow(step: Step, peers: Peers) -> bool:
    """Whether it was the factor of the loss that was too much for the gradients; all peers ask.

    A loss that is not finite itself is not mended by a smaller factor.
    """
    losses = all_gather_values(step.loss, *peers)
    return all(loss is None or math.isfinite(loss) for loss in losses)


def _explain_overflow(step: Step) -> str:
    """Say that a step was skipped because its gradients do not fit into float16, which is usual."""
    return (
        f"step {step.number}: a gradient overflows float16, as happens when the loss is scaled too "
        f"much; skipped, and the factor of the loss is {step.loss_factor / 2:g} from here on"
    )


def _explain_late(turn: SkipGradients) -> str:
    return (
        f"step {turn.step + 1}: the loss or a gradient of worker {turn.replica} is NaN or "
        "infinite; skipped"
    )


def _explain_skipped(rank_state: RankState, trained: TrainedBatch, num_skipped: int) -> str:
    """Say what was wrong with a step in which no weight has changed; all ranks call this together.

    A rank that runs ahead has handed out one more step meanwhile, which is completed first.

    Raises:
        FloatingPointError: the run is to stop at such a step, or skipping does not help.
    """
    complete_step(rank_state)
    where = find_anomaly(rank_state, trained.batch)
    why = f"step {trained.step.number}: the loss or a gradient is NaN or infinite; {where}"
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
def _on_failure(rank_state: RankState, save: Callable[[], None]) -> Iterator[None]:
    """Do what is left to do when this rank fails.

    Where all replicas are equal, what is left of them after one is lost is saved. With --compress
    they are not: each has left out other numbers, and those of one are lost. Where replicas take
    steps of their own, the others are told.
    """
    strategy = rank_state.strategy
    try:
        yield
    except Exception as error:
        is_own = not is_lost_peer(error) and not isinstance(error, WorkerError)
        strategy.fail(ends_run=is_own)  # which would happen to the others too
        layout = rank_state.run.layout
        has_copies = strategy.sums_replicas and layout.num_replicas * layout.num_shards > 1
        has_copies &= rank_state.replicas.compressor is None
        if has_copies and is_lost_peer(error) and settle_after_loss(rank_state):
            save()
        raise
