"""The files of a run: config.toml, metrics.jsonl, summary.json."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from vigpipe.errors import InputError
from vigpipe.files.atomic import write_whole


class RunRecord:
    """Writes a run's files as it goes; one rank of a run has one.

    Rows that a full disk refuses are kept, and written with a later one.

    Args:
        folder: an existing folder.
        config: the resolved options.
        steps_done: optimizer steps of an earlier run that this one goes on from; rows of later
            steps are dropped, and so is a line that a crash cut off.
        log: is given a sentence when a row cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        steps_done: int = 0,
        log: Callable[[str], None] = print,
    ) -> None:
        self.folder, self._tell = folder, log
        self._path = folder / "metrics.jsonl"
        self._waiting = b""  # what is not on disk yet
        self._is_full = False
        try:
            write_whole(folder / "config.toml", tomli_w.dumps(config))
            if self._path.exists():
                kept = list(_rows_up_to(self._path.read_bytes(), steps_done))
                write_whole(self._path, b"".join(kept).decode("utf-8"))
            self._metrics = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InputError(_unwritable(folder, error)) from error

    def add(self, **row: Any) -> None:  # noqa: ANN401
        """Append one row to metrics.jsonl; it is with the kernel when this returns."""
        self._waiting += json.dumps(row).encode() + b"\n"
        try:
            while self._waiting:
                written = os.write(self._metrics, self._waiting)
                self._waiting = self._waiting[written:]
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                self._tell(
                    f"{self._path}: cannot be written ({error.strerror}); the run goes on, and "
                    "keeps the rows until there is room"
                )
            self._is_full = True

    def add_step(
        self, step: int, epoch: int, loss: float, lr: float, seconds: float, num_samples: int
    ) -> None:
        """Append the row of an optimizer step; `num_samples` are those of all replicas."""
        self.add(
            step=step,
            epoch=epoch,
            loss=loss,
            lr=lr,
            step_seconds=seconds,
            images_per_second=num_samples / seconds,
        )

    def add_event(self, event: str, step: int, message: str) -> None:
        """Append what happened beside the steps: a skipped step, a straggler, a resumption."""
        self.add(event=event, step=step, message=message)

    def sync(self) -> None:
        """Put the rows on disk, before a checkpoint that counts on them."""
        with contextlib.suppress(OSError):
            os.fsync(self._metrics)

    def close(self) -> None:
        """After the last row, or when the run fails."""
        if self._metrics >= 0:
            os.close(self._metrics)
            self._metrics = -1

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and close.

        Raises:
            InputError: there are rows that could not be written, or the summary cannot.
        """
        self.close()
        try:
            if self._waiting:
                with self._path.open("ab") as file:
                    file.write(self._waiting)
            text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
            write_whole(self.folder / "summary.json", text)
        except OSError as error:
            raise InputError(_unwritable(self.folder, error)) from error


def _rows_up_to(content: bytes, last_step: int) -> Iterator[bytes]:
    """The whole lines of metrics.jsonl up to the one of a step, and its evaluation's."""
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.get("step", 0) > last_step or not last_step:
            return
        yield line


def _unwritable(folder: Path, error: OSError) -> str:
    return (
        f"--out {folder}: cannot be written ({error.strerror}); make room or choose another "
        "folder, and go on with --resume"
    )
