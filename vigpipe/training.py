"""A training run from top to bottom; docs/code.md follows one batch through it."""

import contextlib
import math
import os
import time
from functools import partial
from pathlib import Path

import torch

from vigpipe.analysis.run_timing import (
    describe,
    gather_timing,
    make_recorder,
    where_the_rest_is,
    write_timing,
)
from vigpipe.checkpoint.checkpoints import Checkpoints
from vigpipe.checkpoint.manifest import folder_name
from vigpipe.checkpoint.resume import check_same_options, read_same_data, resume
from vigpipe.checkpoint.weights_file import save_run_weights
from vigpipe.checkpoint.wide_run import save_wide_weights
from vigpipe.config.interval import parse_interval
from vigpipe.config.replication import balances_parts
from vigpipe.errors import DONE, INTERRUPTED, SAVED, InputError, WorkerError
from vigpipe.job.score import Scores
from vigpipe.launch.environment import FOLDER_VARIABLE, tells_for_all
from vigpipe.launch.failures import is_lost_peer, note_met
from vigpipe.messages import tell
from vigpipe.parallel.agreement import Status, agree, run_with_heartbeats
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.strategy import Loop, Pushed
from vigpipe.run.batches import read_batch
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.events import open_events, read_events, take_over_events
from vigpipe.run.facts import Run
from vigpipe.run.folder import AVERAGED_WEIGHTS, WEIGHTS, lock
from vigpipe.run.header import header
from vigpipe.run.others import Others
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.reporter import Reporter
from vigpipe.run.settle import Kept, settle, share_evaluation, take_over_merged
from vigpipe.run.step import apply_gradients, complete_step, settle_after_loss, train_step
from vigpipe.run.stop_and_save import (
    SaveAndStop,
    how_to_go_on,
    parse_stop_before,
    what_is_saved,
)
from vigpipe.run.summary import gather_accounts, gather_compression, gather_sent, summarize
from vigpipe.timing.clock import read_clocks


def train(run: Run, rank: int, device: torch.device, folder: Path) -> int:
    """Train as one rank; return DONE, or the code of a run that was stopped and has saved."""
    training = Training(run, rank, device, folder)
    if FOLDER_VARIABLE in os.environ:
        # If this rank dies from now on, its launcher may keep the others.
        note_met(Path(os.environ[FOLDER_VARIABLE]), rank)
    with contextlib.closing(training.reporter):
        try:
            return training.carry_out()
        except Exception as error:
            return training.fail(error)  # which may have more to tell


class Training(Loop):
    """One rank's part in a training run; see `train`."""

    def __init__(self, run: Run, rank: int, device: torch.device, folder: Path) -> None:
        self._started = time.perf_counter()
        self._run, self._folder, config = run, folder, run.config
        self._save_and_stop = SaveAndStop(
            parse_interval("--checkpoint-every", config.checkpoint_every),
            parse_stop_before(config.stop_before, os.environ),
            rank=rank,
            has_peers=run.layout.world_size > 1,
            timeout_seconds=config.timeout or math.inf,
        )
        recorded = None
        if config.replay is not None:
            check_same_options(config.replay, run)
            recorded = None if balances_parts(config) else read_events(config.replay, run)
        recorder = make_recorder(run, rank, device)
        self._state = state = make_rank_state(run, rank, device, recorder, recorded)
        self.reporter = reporter = Reporter(state, folder)
        for note in (*header(run, device, folder), *run.notes):
            reporter.log(note)

        resumed = resume(state, folder, reporter.log)
        self._resumed = resumed
        if config.replay is not None and balances_parts(config):
            read_same_data(state.feed, config.replay)
        before = {} if resumed is None else resumed.replicas
        reporter.begin(None if resumed is None else resumed.loss, before.get("metrics_bytes"))
        self._others = Others(state)
        if reporter.record is not None:
            num_bytes = before.get("events_bytes")
            self._others.begin(reporter.record, lambda inbox: open_events(run, folder, num_bytes))
        self._checkpoints = Checkpoints(state, folder, reporter.log, resumed)
        self._clocks = [] if recorder is None else read_clocks()  # again when all is recorded
        if tells_for_all(os.environ):
            self._save_and_stop.end_with(self._last_words)
        self._stopped: int | None = None  # the exit code, once the run has stopped and saved
        self._scores: Scores | None = None
        self._at_the_end: Kept | None = None
        # Whether the evaluation that is due after the last step has been done.
        self._is_evaluated = resumed is None or resumed.evaluated
        if resumed is not None and reporter.record is not None:
            text = f"from a checkpoint of {resumed.layout['text']}"
            num_before = resumed.config.get("dp", 1)
            reporter.record.add_event("resumed", state.step, text, replicas_before=num_before)

    def carry_out(self) -> int:
        """Take the steps that are left, write the results, and return the exit code."""
        state, reporter = self._state, self.reporter
        # To the end: SIGTERM and Ctrl-C must not end this rank while it saves.
        with self._save_and_stop:
            with reporter.progress:
                self._take_steps()
            if self._stopped is not None:
                return self._stopped
            if state.own_steps is None or not state.own_steps.membership.has_left:
                self._at_the_end = Kept(state)
                with self._save_and_stop.patient():
                    self._others.together(self._finish)
            self._others.close()
            state.feed.close()
            return DONE

    def _last_words(self) -> str:
        newest = self._checkpoints.saver.newest or (self._resumed and self._resumed.step)
        name = folder_name(newest) if newest else None
        return f"ended by a second Ctrl-C, {what_is_saved(self._folder, name)}"

    def _take_steps(self) -> None:
        state, reporter, run = self._state, self.reporter, self._run
        for item in state.strategy.items(state.step, self._is_evaluated, self):
            batch, fill = read_batch(state, item), run.fill(item.number)
            with state.timed("train", state.step + 1, fill):
                step = train_step(state, batch, partial(self._wishes_after, batch.step))
            state.strategy.hear(step.agreement, is_full=fill.is_full)
            reporter.add(step, batch, item.number)
            measured = batch.step - (2 if state.runs_ahead else 1)
            if told := state.feed.hear(batch.step, measured, step.agreement.busy_seconds):
                reporter.announce("data", told)
            self._is_evaluated = not item.is_evaluation_due
            self._tell_lost()

    def _wishes_after(self, step: int) -> Status:
        is_save_due = self._state.is_writer and self._save_and_stop.is_save_due(step + 1)
        return Status(stop=self._save_and_stop.is_stop_due(), save=is_save_due)

    def _tell_lost(self) -> None:
        layout = self._run.layout
        for replica in self._others.newly_lost():
            num, what = layout.num_teams, "worker" if layout.has_server else "replica"
            left = f"{num - self._others.num_lost()} of {num}"
            self.reporter.announce(
                "lost", f"{what} {replica} was lost; the run goes on with {left}"
            )

    # ---- what the strategy asks for between two items -------------------------------------------

    def complete(self) -> None:
        complete_step(self._state)
        self.reporter.tell_complete()

    def evaluate(self, epoch: int) -> bool:
        self.complete()
        with self._save_and_stop.patient():
            if self._run.layout.has_server:
                scores = self._others.together(self._evaluate_shared)
            else:
                take_over_merged(self._state)
                scores = evaluate_all(self._state, self.reporter.progress.tell_of_test)
        self.reporter.add_scores(epoch, scores)
        self._scores, self._is_evaluated = scores, True
        return self._checkpoints.is_best(scores)

    def _evaluate_shared(self, left: Counterparts) -> Scores:
        share_evaluation(self._state, left)
        return evaluate_all(self._state, self.reporter.progress.tell_of_test)

    def apply(self, pushed: Pushed) -> None:
        strategy = self._state.strategy
        lr = apply_gradients(self._state, pushed)
        strategy.hear(agree(self._wishes_after(pushed.step), strategy.peers))
        self.reporter.add_pushed(pushed, lr)
        self._tell_lost()

    def skip(self, replica: int, step: int) -> None:
        what = f"step {step + 1}: the loss or a gradient of worker {replica} is NaN or infinite"
        self.reporter.announce("skipped", f"{what}; skipped", step + 1)

    def take_over(self) -> None:
        with contextlib.suppress(StoreLostError):  # all hear of it next
            self._write_files()

    def _write_files(self) -> None:
        run, state, folder = self._run, self._state, self._folder
        _, of_team = run.layout.team_of(state.mesh.replica_index)
        state.writes_files = of_team == 0
        if not state.is_writer:
            return
        with contextlib.suppress(InputError):  # one that is frozen may still hold it
            lock(folder)
        self._checkpoints.take_over()
        self._others.begin(
            self.reporter.take_over(),
            lambda inbox: take_over_events(run, folder, inbox.noted.get("events_bytes")),
        )

    def flush(self) -> None:
        run_with_heartbeats(self._checkpoints.saver.finish, *self._state.strategy.peers)

    def rest(self, step: int, *, stop: bool) -> None:
        self.complete()
        self._state.step = step
        with self._save_and_stop.patient():
            if not stop:
                self._save()
                return
            self._others.together(self._stop)
            self._others.close()

    def _save(self) -> None:
        """Begin a checkpoint of the last step, once the rows that it counts on are on disk."""
        reporter, events_bytes = self.reporter, self._others.write()
        metrics_bytes = 0 if reporter.record is None else reporter.record.sync()
        self._checkpoints.save(reporter.loss, self._is_evaluated, metrics_bytes, events_bytes)
        self._save_and_stop.saved()

    # ---- the end --------------------------------------------------------------------------------

    def _stop(self, _: Counterparts) -> None:
        """Save and wait for the checkpoint, all ranks at once: launchers end the others."""
        state, folder, saver = self._state, self._folder, self._checkpoints.saver
        if self._others.is_to_write() and not state.writes_files:
            self._write_files()
        self._save()
        self.flush()
        mine = self._save_and_stop
        told = self._others.all_gather([saver.newest or 0, mine.code, mine.why])
        # Of Ctrl-C all ranks tell the launcher, though some may have got another signal.
        self._stopped = INTERRUPTED if INTERRUPTED in [code for _, code, _ in told] else SAVED
        whys = [why for _, code, why in told if why and code == self._stopped]
        why = next(iter(whys), "a replica that is lost was asked to stop")
        if max(newest for newest, _, _ in told) != state.step:
            raise InputError(
                f"asked to stop ({why}), but the checkpoint of step {state.step} could not be "
                f"written to {saver.folder}; make room, and {how_to_go_on(folder)}"
            )
        self.reporter.log(
            f"stopped after step {state.step} of {self._run.num_steps} ({why}) with a checkpoint "
            f"in {saver.folder}; {how_to_go_on(folder)}"
        )

    def _finish(self, left: Counterparts) -> None:
        """Evaluate the weights that are kept, and write the results, with all that are left."""
        state, run, folder = self._state, self._run, self._folder
        if self._others.is_to_write() and not state.writes_files:
            self._write_files()
        self._tell_lost()
        accounts = None
        if (own_steps := state.own_steps) is not None:
            self._settle(left, own_steps)
            accounts = gather_accounts(state, own_steps.account(), own_steps.membership.all_gather)
        elif self._scores is None:  # the checkpoint was of the last step
            self._scores = evaluate_all(state, self.reporter.progress.tell_of_test)
        counted = accounts, gather_compression(state), gather_sent(state)
        timing = None if state.recorder is None else gather_timing(state, self._clocks)
        save = save_run_weights if state.wide_rows is None else save_wide_weights
        save(state, folder / WEIGHTS)
        if state.trained.ema is not None:
            with state.trained.averaged():
                save_run_weights(state, folder / AVERAGED_WEIGHTS)
        self._checkpoints.saver.finish()
        reporter = self.reporter
        if reporter.record is None:
            return
        assert self._scores is not None
        summary = summarize(state, self._scores, reporter.loss, self._started, *counted)
        if self._resumed is not None:
            summary["resumed_at_step"] = self._resumed.step
        if (best := self._checkpoints.best) is not None:
            summary["best"] = best.as_table()
            reporter.log(f"best at step {best.step}: {best}, which chose it")
        if timing is not None:
            summary["timing"] = timing.summary()
        self._others.finish()
        reporter.record.finish(summary)
        if timing is not None:
            write_timing(timing, run, folder, state.device)
            tables = f"{describe(timing)}\n\n{where_the_rest_is(folder, run.config.trace)}"
            reporter.console.print(tables, markup=False)
        reporter.log(f"weights and metrics in {folder}")

    def _settle(self, left: Counterparts, own_steps: OwnSteps) -> None:
        """Decide which weights are kept of replicas that differ, and score those."""
        state, run = self._state, self._run
        assert self._at_the_end is not None
        self._at_the_end.restore()
        if kept := settle(state, left, own_steps):
            self.reporter.log(kept)
        self._scores = self._evaluate_shared(left)
        self.reporter.add_scores(run.course.epoch(run.num_steps - 1), self._scores)

    # ---- failing --------------------------------------------------------------------------------

    def fail(self, error: Exception) -> int:
        """Do what is left to do when this rank fails; called while the error is handled.

        Equal replicas save what is left of them. Of those with steps of their own, one that cannot
        reach the others saves what it has, and SAVED is returned. Otherwise the error is raised.
        """
        if self._save_and_stop.code == INTERRUPTED and not self._save_and_stop.has_stepped:
            raise KeyboardInterrupt from error  # it has ended what the first step needed: compilers
        self._others.fail(is_own=not is_lost_peer(error) and not isinstance(error, WorkerError))
        state, own_steps = self._state, self._state.own_steps
        if isinstance(error, StoreLostError) and own_steps is not None:
            if own_steps.membership.outlives and self._save_without_store(own_steps):
                if state.pipeline.has_last and state.mesh.shards.rank == 0:
                    team, _ = self._run.layout.team_of(state.mesh.replica_index)
                    who = "the server" if self._run.layout.has_server else f"replica {team}"
                    tell(f"{error}; {who} has saved what it has; {how_to_go_on(self._folder)}")
                return SAVED
        elif is_lost_peer(error) and has_copies(state) and settle_after_loss(state):
            self.reporter.tell_saved()
            with self._save_and_stop.patient():
                self._checkpoints.rescue(self.reporter.loss, self._is_evaluated)
        elif isinstance(error, FloatingPointError) and own_steps is None:
            self._checkpoints.saver.finish()  # all peers have the error, and write their shares too
        raise error

    def _save_without_store(self, own_steps: OwnSteps) -> bool:
        """Save what this replica has; returns whether all its ranks have done so."""
        state = self._state
        self.complete()
        if self._at_the_end is not None:
            self._at_the_end.restore()
        with self._save_and_stop.patient():
            loss, left_over = self.reporter.loss, own_steps.left_over()
            is_saved = self._checkpoints.rescue(loss, self._is_evaluated, left_over)
        state.feed.close()
        self._others.close()
        return agree(Status(finite=is_saved), state.strategy.peers).finite


def has_copies(rank_state: RankState) -> bool:
    """Whether other ranks have all that this one has, so that what is left of them can be saved."""
    layout = rank_state.run.layout
    is_alone = layout.num_replicas * layout.num_shards == 1
    # With --compress they have not: each replica has left out other numbers.
    return not is_alone and rank_state.own_steps is None and rank_state.reducer.compressor is None
