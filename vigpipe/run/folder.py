"""Make the folder of a run and lock it, so that no two runs share one."""

import contextlib
import fcntl
import itertools
import os
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.files.outputs import check_new_names, check_replaceable, told_if_unwritable

CHECKPOINTS, METRICS, SUMMARY = "checkpoints", "metrics.jsonl", "summary.json"
EVENTS = "events.jsonl"  # what replicas with steps of their own did
WEIGHTS, AVERAGED_WEIGHTS = "model.safetensors", "model-ema.safetensors"
RESULTS = (SUMMARY, WEIGHTS, AVERAGED_WEIGHTS)
TIMING = ("timing.csv", "timing.md", "timeline.json", "trace.json", "timeline.png", "timeline.svg")
METRICS_TABLE, TENSORBOARD = "metrics.csv", "tensorboard"
WANDB_RUN, MLFLOW_RUN = ".wandb-run", ".mlflow-run"  # the tracker's name of the run
# What vigpipe train and vigpipe time write; plan.toml and the files beside it with --stages auto.
RUN_FILES = (
    *("config.toml", METRICS, EVENTS, *RESULTS, CHECKPOINTS, *TIMING),
    *("plan.toml", "plan.profile.json"),
    *(METRICS_TABLE, TENSORBOARD, "wandb", WANDB_RUN, MLFLOW_RUN),
)
_FOLDERS = (CHECKPOINTS, TENSORBOARD, "wandb")
LOCK = ".lock"  # the first file of a run, which stays
MAKE_ROOM = "make room or choose another folder, and go on with --resume"  # advice to a user


def make_output_folder(
    folder: Path | None, names: Sequence[str], *, goes_on: bool = False, advice: str = ""
) -> Path:
    """Make the output folder of a command; by default runs/<time>.

    Raise InputError if it cannot be written, or, with the advice, if a file of the command is there
    and it does not go on with a run.
    """
    with told_if_unwritable(f"--out {folder or 'runs'}", "choose another folder"):
        if folder is None:
            return _new_default_folder()
        files = [name for name in names if name not in _FOLDERS]
        check_replaceable(folder, [LOCK, *(files if goes_on else ())])
        if not goes_on:
            check_new_names(folder, names, f"choose another folder{advice}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # whether there can be one
            pass
    return folder


def lock(folder: Path) -> None:
    """Keep other runs out of a folder until this process ends; InputError if one is there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with told_if_unwritable(f"--out {folder}: {LOCK}", "choose another folder"):
        descriptor = os.open(folder / LOCK, flags, 0o666)
        holder = os.read(descriptor, 300).decode("utf-8", "replace").strip()
    if holder and not re.fullmatch(r"process [0-9]+ on \S*", holder):
        raise InputError(
            f"--out {folder}: has a file {LOCK} that no run has made; choose another folder"
        )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
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


def is_locked(folder: Path) -> bool:
    """Whether a run on any host is writing to a folder now; never where files have no locks."""
    try:
        # A pipe of this name is not waited for. A shared lock needs no right to write the file.
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no run was here, or not for us to see
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _new_default_folder() -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):  # another run may have started in the same second
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("itertools.count ended")
