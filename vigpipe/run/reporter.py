"""What the user is told of a run: on the console, in its files, by its tracker."""

import math
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vigpipe.config.files import as_toml
from vigpipe.job.score import Scores
from vigpipe.messages import one_line
from vigpipe.parallel.agreement import Peers, run_with_heartbeats
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.values import all_gather_values
from vigpipe.replication.strategy import Pushed
from vigpipe.run.anomaly import advise, find_anomaly, find_largest
from vigpipe.run.progress import RunProgress
from vigpipe.run.rank import HandedStep, RankState
from vigpipe.run.record import RunRecord, gradients_row, step_row
from vigpipe.run.slow_data import SlowData
from vigpipe.run.step import complete_step
from vigpipe.run.stragglers import Stragglers

MAX_SKIPPED = 10  # steps in a row; after that, skipping does not help


class TakenStep(NamedTuple):
    """A step with the batch that it was taken with, and the number of the item."""

    step: HandedStep
    batch: ReplicaBatch
    item: int


class Reporter:
    """Tells the user of a run, and closes its files. Only that of the rank that writes is heard."""

    progress: RunProgress
    record: RunRecord | None = None  # the run's files, on the rank that writes
    loss: float | None = None  # of the last step, on the last stage; None if it was skipped

    def __init__(self, rank_state: RankState, folder: Path) -> None:
        run = rank_state.run
        self._state, self._folder = rank_state, folder
        # By default rich believes $FORCE_COLOR, and draws a bar into the logs of CI and notebooks.
        self.console = Console(
            quiet=not rank_state.is_writer,
            force_terminal=sys.stdout.isatty(),
            soft_wrap=True,
            highlight=False,
        )
        self._num_skipped = 0  # steps in a row
        self._has_told_empty = False
        self._untold: deque[TakenStep] = deque()  # steps of which nothing has been told yet
        self._stragglers = Stragglers(run.layout.one_team)
        runs_ahead, unit = rank_state.runs_ahead, run.job.unit
        self._slow_data = SlowData(run.config.workers, runs_ahead=runs_ahead, unit=unit)

    def begin(self, loss: float | None = None, num_bytes: int | None = None) -> None:
        """Open the run's files, and its tracker, whose server may be far away; all ranks call this.

        If the run goes on, `loss` is that of the last step, and so many bytes of its rows count.
        """
        run, step = self._state.run, self._state.step
        self.loss = loss
        config, unit = run.config, run.job.unit
        num_epochs = run.course.epoch(run.num_steps - 1)
        self.progress = RunProgress(
            self.console, run.num_steps, step, config.log_every, unit, num_epochs
        )

        def open_record() -> RunRecord | None:
            if not self._state.is_writer:
                return None
            options = as_toml(config)
            return RunRecord(self._folder, options, step, self.log, config.track, num_bytes)

        self.record = run_with_heartbeats(open_record, run.layout.world_size)

    def take_over(self) -> RunRecord:
        self.console.quiet = False
        config, step = self._state.run.config, self._state.step
        facts = self._folder, as_toml(config), step, self.log, config.track
        self.record = RunRecord(*facts, takes_over=True)
        return self.record

    def close(self) -> None:
        if self.record is not None:
            self.record.close()

    def log(self, sentence: str) -> None:
        self.console.print(one_line(sentence), markup=False)

    def announce(self, event: str, message: str, step: int | None = None) -> None:
        """Record an event beside the steps, by default at the last one, and tell the user."""
        if self.record is not None:
            self.record.add_event(event, self._state.step if step is None else step, message)
        self.log(message)

    def add(self, step: HandedStep, batch: ReplicaBatch, item: int) -> None:
        """Tell of all steps that are complete, this one perhaps among them, and of stragglers."""
        self._untold.append(TakenStep(step, batch, item))
        self.tell_complete()
        for straggler in self._stragglers.add(step.agreement.busy_seconds):
            self.announce("straggler", str(straggler))

    def tell_complete(self) -> None:
        while self._untold and self._untold[0].step.is_complete:
            self._tell(self._untold.popleft())

    def tell_saved(self) -> None:
        """Tell of the steps that are in the state which is saved after a peer was lost."""
        for taken in self._untold:
            if taken.step.is_complete and taken.step.is_taken:
                self._tell(taken)

    def _tell(self, taken: TakenStep) -> None:
        """Record a complete step and show it, or explain why it was not taken."""
        step, batch = taken.step, taken.batch
        if step.is_finite and not any(batch.sizes):  # this replica has nothing of a partial batch
            return
        self.loss = step.loss if step.is_finite else None
        peers = self._state.strategy.peers
        if not step.is_finite and step.loss_factor > 1 and _is_overflow(step, peers):
            why = (
                f"step {step.number}: a gradient overflows float16, as happens when the loss is "
                f"scaled too much; skipped, and the factor of the loss is {step.loss_factor / 2:g} "
                "from here on"
            )
            self.announce("overflow", why, step.number)
            return
        self._num_skipped = 0 if step.is_finite else self._num_skipped + 1
        if self._num_skipped:
            why = _explain_skipped(self._state, taken, self._num_skipped)
            self.announce("skipped", why, step.number)
        elif step.agreement.empty:
            if self.loss is not None:
                self._add_empty(taken)
            self.loss = None
        elif self.loss is not None and step.is_taken:
            self._add_row(taken, self.loss)

    def _add_row(self, taken: TakenStep, loss: float) -> None:
        run, (step, batch, item) = self._state.run, taken
        facts = step.number, run.course.epoch(batch.step), loss, step.lr
        num_samples, waited = batch.num_samples, step.agreement.data_seconds
        size = *run.in_batches(item), num_samples
        row = step_row(
            *facts, step.seconds, run.job.rates(*size, step.seconds), waited, **self._whose(item)
        )
        if self.record is None:
            self._note(row)
            return
        self.record.add_step(row)
        self.progress.add(*facts, num_samples, run.job.num_rows(*size))
        counts = run.fill(item).is_full or not run.fill(0).is_full
        if counts and (why := self._slow_data.add(waited, step.seconds)):
            self.announce("data", why, step.number)

    def _whose(self, item: int) -> dict[str, int]:
        """Return what a row says of the replica that took the step, if replicas have their own."""
        if self._state.own_steps is None:
            return {}
        team, _ = self._state.run.layout.team_of(self._state.mesh.replica_index)
        return {"replica": team, "item": item}

    def _note(self, row: dict[str, Any]) -> None:
        """Leave a row to the rank that writes; the first rank of a replica's last stage does."""
        mesh, own_steps = self._state.mesh, self._state.own_steps
        _, of_team = self._state.run.layout.team_of(mesh.replica_index)
        if own_steps is not None and of_team == 0 and mesh.shards.rank == 0:
            own_steps.note(row)

    def _add_empty(self, taken: TakenStep) -> None:
        """Record that a step had nothing to train on of its own; tell the first time."""
        step, item = taken.step, taken.item
        name, outcome = "skipped", "skipped"
        if step.is_taken:
            name, outcome = "empty", "taken with the gradients of others"
        unit = self._state.run.job.unit
        message = f"step {step.number}: no training {unit} in its sub-graphs; {outcome}"
        facts = {"event": name, "step": step.number, "message": message}
        event = {**facts, **self._whose(item)}
        if self.record is None:
            self._note(event)
        else:
            self.record.add(**event)
        if not self._has_told_empty:
            self.log(f"{message} (metrics.jsonl has all such steps)")
        self._has_told_empty = True

    def add_pushed(self, pushed: Pushed, lr: float) -> None:
        run, self.loss = self._state.run, pushed.loss
        if self.record is None:
            return
        size = *run.in_batches(pushed.item), pushed.num_samples
        rates = run.job.rates(*size, pushed.seconds)
        self.record.add_step(gradients_row(pushed, run.course, lr, rates))
        facts = pushed.step + 1, run.course.epoch(pushed.step), pushed.loss, lr
        self.progress.add(*facts, pushed.num_samples, run.job.num_rows(*size))

    def add_scores(self, epoch: int, scores: Scores) -> None:
        if self.record is not None and scores.test is not None:
            training_loss = self.record.add_evaluation(epoch, scores.as_row())
            told = "" if training_loss is None else f"training loss {training_loss:.4f}; "
            self.log(f"{self.progress.of_epochs(epoch)}: {told}{scores}")
        self.progress.resume()


def _is_overflow(step: HandedStep, peers: Peers) -> bool:
    """Whether it was the factor of the loss that was too much for the gradients; all peers ask."""
    # A loss that is not finite itself is not mended by a smaller factor.
    losses = all_gather_values(step.loss, *peers)
    return all(loss is None or math.isfinite(loss) for loss in losses)


def _explain_skipped(rank_state: RankState, taken: TakenStep, num_skipped: int) -> str:
    """Say what was wrong with a step that changed nothing, or raise it as FloatingPointError.

    All ranks call this together. One that runs ahead first completes the step that follows.
    """
    complete_step(rank_state)
    where = find_anomaly(rank_state, taken.batch)
    why = f"step {taken.step.number}: the loss or a gradient is NaN or infinite; {where}"
    stops = rank_state.run.config.on_nan == "stop"
    if not stops and num_skipped < MAX_SKIPPED:
        return f"{why}; skipped"
    have_moved = num_skipped < taken.step.number
    largest = None if have_moved else find_largest(rank_state, taken.batch)
    advice = advise(rank_state.run, largest, have_moved=have_moved)
    if not stops:
        why += f"; {num_skipped} steps in a row were skipped, which does not help"
    elif have_moved:
        advice += ", or leave such steps out with --on-nan skip"
    raise FloatingPointError(f"{why}; {advice}")
