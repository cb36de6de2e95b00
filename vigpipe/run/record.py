"""Write the files of a run: config.toml, metrics.jsonl, summary.json; and tell its tracker."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from vigpipe.config.choices import Track
from vigpipe.files.atomic import write_atomically
from vigpipe.files.names import escaped
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.files.rows import RowsFile, parse_row
from vigpipe.job.rows import samples_in
from vigpipe.replication.course import Course
from vigpipe.replication.strategy import Pushed
from vigpipe.run.folder import MAKE_ROOM, METRICS, SUMMARY
from vigpipe.run.trackers import Tracker, open_tracker


def step_row(
    step: int,
    epoch: int,
    loss: float,
    lr: float,
    seconds: float,
    rates: Mapping[str, float],
    data_seconds: float,
    **whose: int,
) -> dict[str, Any]:
    """Make the row of a step, counted from 1 as epochs are; `whose` is replica, item, staleness."""
    return {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "lr": lr,
        "step_seconds": seconds,
        **rates,
        "data_seconds": data_seconds,
        **whose,
    }


def gradients_row(
    pushed: Pushed, course: Course, lr: float, rates: Mapping[str, float]
) -> dict[str, Any]:
    """Make the row of a step that a server has taken with the gradients of a replica."""
    facts = pushed.step + 1, course.epoch(pushed.step), pushed.loss, lr, pushed.seconds, rates
    whose = {"replica": pushed.replica, "item": pushed.item, "staleness": pushed.staleness}
    return step_row(*facts, data_seconds=0.0, **whose)


class RunRecord:
    """Writes the files of a run while it goes on; only one rank of a run has a record.

    Rows that a full disk refuses are kept in memory and written together with a later row. Of an
    earlier run that goes on, the rows of `steps_done` steps are kept, within the first `num_bytes`.
    A rank that `takes_over` goes on with the files of a lost one.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        steps_done: int = 0,
        log: Callable[[str], None] = print,
        track: Track | None = None,
        num_bytes: int | None = None,
        *,
        takes_over: bool = False,
    ) -> None:
        self.folder, self._log = folder, log
        self._path = folder / METRICS
        self._is_full = False
        # Loss and samples are sums over the epoch's steps so far.
        self._epoch, self._loss_sum, self._num_samples = 0, 0.0, 0
        kept: list[tuple[bytes, dict[str, Any]]] = []  # rows of the run that this one continues
        with told_if_unwritable(f"--out {folder}", MAKE_ROOM):
            write_atomically(folder / "config.toml", tomli_w.dumps(config))
            if self._path.exists():
                last_step = None if takes_over else steps_done
                kept = list(_rows_up_to(self._path.read_bytes()[:num_bytes], last_step))
                write_atomically(self._path, b"".join(line for line, _ in kept).decode("utf-8"))
            self._metrics = RowsFile(self._path)
        for _, row in kept:
            self._count(row)
        self._step = steps_done
        told = [row for _, row in kept if not _came_late(row)]
        self._tracker = None if track is None else open_tracker(track, folder, config, told)

    def add(self, **row: Any) -> None:
        """Append one row to metrics.jsonl; the kernel has it when this returns."""
        self.write([row])
        self._step = row.get("step", self._step)
        self._tell_tracker(lambda tracker: tracker.add(row, self._step))

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows without telling the tracker, as those of other replicas, which come late."""
        try:
            self._metrics.add(rows)
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                self._log(
                    f"{self._path}: cannot be written ({error.strerror}); the run goes on, and "
                    "keeps the rows until there is room"
                )
            self._is_full = True

    def add_step(self, row: Mapping[str, Any]) -> None:
        self.add(**row)
        self._count(row)

    def add_evaluation(self, epoch: int, scores: Mapping[str, Any]) -> float | None:
        """Append the row of an evaluation (`Scores.as_row`); return the epoch's training loss."""
        # The mean over the training samples, each as of its own step; None if all were skipped.
        has_steps = self._epoch == epoch and self._num_samples > 0
        loss = self._loss_sum / self._num_samples if has_steps else None
        self.add(epoch=epoch, **({} if loss is None else {"training_loss": loss}), **scores)
        return loss

    def _count(self, row: Mapping[str, Any]) -> None:
        """Count the row of an optimizer step, new or of an earlier run, for its epoch's loss."""
        if _came_late(row):
            return  # the epoch's loss is that of replica 0
        values, num_samples = [row.get(name) for name in ("epoch", "loss")], samples_in(row)
        are_numbers = all(isinstance(v, int | float) and math.isfinite(v) for v in values)
        if num_samples is None or not are_numbers:
            return  # another row, or one that this program did not write
        if row["epoch"] != self._epoch:
            self._epoch, self._loss_sum, self._num_samples = row["epoch"], 0.0, 0
        self._loss_sum += row["loss"] * num_samples
        self._num_samples += num_samples

    def add_event(self, event: str, step: int, message: str, **facts: int) -> None:
        """Append what happened after a step: one word, a sentence, and its numbers for programs."""
        self.add(event=event, step=step, message=message, **facts)

    def sync(self) -> int:
        """Force the rows to disk, for a checkpoint that requires them; return the file's size."""
        return self._metrics.sync()

    def close(self) -> None:
        """Close metrics.jsonl and the tracker, after the last row or when the run fails."""
        self._metrics.close()
        self._tell_tracker(lambda tracker: tracker.close())
        self._tracker = None  # which may be told nothing more

    def _tell_tracker(self, tell: Callable[[Tracker], None]) -> None:
        """Do something with the tracker; if it fails, say so once and go on without it."""
        try:
            if self._tracker is not None:
                tell(self._tracker)
        except Exception as error:  # A tracker has errors of its own: no network, a full disk.
            self._tracker = None
            self._log(
                f"--track: failed at step {self._step} ({type(error).__name__}: "
                f"{escaped(str(error))}); the run goes on without it, "
                "and metrics.jsonl has all rows"
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the remaining rows and summary.json, or raise InputError; close."""
        self.close()
        with told_if_unwritable(f"--out {self.folder}", MAKE_ROOM):
            self._metrics.finish()
            text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.folder / SUMMARY, text)


def _came_late(row: Mapping[str, Any]) -> bool:
    """Whether a row is of another replica than 0 and came when all rested, as no server's does."""
    return bool(row.get("replica")) and "staleness" not in row


def _rows_up_to(content: bytes, last_step: int | None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the whole lines of metrics.jsonl with their rows, up to a step and its evaluation."""
    for line in content.splitlines(keepends=True):
        try:
            row = parse_row(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict):
            return
        if last_step is not None and (row.get("step", 0) > last_step or not last_step):
            return
        yield line, row
