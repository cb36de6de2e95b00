"""Make the folder of a run and lock it, so that no two runs share one."""

import contextlib
import fcntl
import itertools
import os
import platform
import time
from pathlib import Path

from vigpipe.errors import InputError


def make_output_folder(folder: Path | None, goes_on: bool = False) -> Path:
    """Make the folder of a run; by default runs/<time>.

    Args:
        folder: the option --out; None if it was not given.
        goes_on: whether the folder may already hold a run, which this run continues.

    Returns:
        The folder, which exists and can be written to.

    Raises:
        InputError: the folder cannot be made or written to, or already holds a run.
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
        InputError: another run is writing to the folder.
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
    for number in itertools.count(1):  # another run may have started in the same second
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("itertools.count ended")
