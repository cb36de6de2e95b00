"""The files of a run: config.toml, metrics.jsonl, summary.json."""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

import vigpipe
from vigpipe.errors import InputError
from vigpipe.whole import write_whole

_PACKAGES = ("torch", "torchvision", "torch-geometric", "timm", "numpy", "scikit-learn")


def make_output_folder(folder: Path | None, goes_on: bool = False) -> Path:
    """Make the folder of a run; by default runs/<time>.

    Args:
        folder: the wish.
        goes_on: it may hold a run, which this one continues.

    Raises:
        InputError: it cannot be made or written to, or already holds a run.
    """
    try:
        if folder is None:
            return _new_default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--out {folder or 'runs'}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    if not goes_on and (folder / "metrics.jsonl").exists():
        raise InputError(
            f"--out {folder}: holds a run already; choose another folder, delete it, or go on with "
            "--resume auto"
        )
    return folder


def lock(folder: Path) -> None:
    """Keep other runs out of a folder until this process ends, however it ends.

    Raises:
        InputError: another run is at work in it.
    """
    path = folder / ".lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode("utf-8", "replace").strip()
        raise InputError(
            f"--out {folder}: another run is writing to it ({holder}); wait for its end, or choose "
            "another folder"
        ) from None
    except OSError:  # a file system without locks
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    _locks.append(descriptor)


_locks: list[int] = []  # open for as long as this process lives


def _new_default_folder() -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):  # another run may have begun in the same second
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("itertools.count ended")


def provenance() -> dict[str, Any]:
    """Versions, commit and host: what a number needs to be believed."""
    versions = {"vigpipe": vigpipe.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"versions": versions, "commit": commit(), "host": platform.node()}


@functools.cache
def commit() -> str | None:
    """The commit of this package's checkout, "+" behind it if files differ; None outside one."""
    root = Path(vigpipe.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


class RunRecord:
    """Writes a run's files as it goes; one rank of a run has one.

    Rows that a full disk refuses are kept, and written with a later one.

    Args:
        folder: an existing folder.
        config: the resolved options.
        steps_done: optimizer steps of an earlier run that this one goes on from; rows of later
            steps are dropped, and so is a line that a crash cut off.
        tell: is given a sentence when a row cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        steps_done: int = 0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.folder, self._tell = folder, tell
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
