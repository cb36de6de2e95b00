"""Write and read events.jsonl: what replicas with steps of their own did (`replication.record`).

The rows of a start come first, and again whenever the run goes on:

    {"start": {"replicas": 2, "microbatches": 2, "threads": 1, "steps": 80}}

Rows are written when all replicas rest, with the checkpoint that they lead to.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vigpipe.errors import InputError
from vigpipe.files.untrusted import MOST_ROWS, read_bytes
from vigpipe.replication.record import Recorded, collect
from vigpipe.run.facts import Run
from vigpipe.run.folder import EVENTS


class EventsFile:
    """Appends events of all replicas; only one rank of a run has it.

    Args:
        folder: the folder of the run, which exists.
        start: the facts of this start, from `start_facts`.
        num_bytes: of the earlier run's rows that count; 0 if the run is new.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, folder: Path, start: Mapping[str, int], num_bytes: int = 0) -> None:
        self._path = folder / EVENTS
        try:
            is_there = num_bytes and self._path.exists()  # not if the run goes on elsewhere
            self._path.write_bytes(self._path.read_bytes()[:num_bytes] if is_there else b"")
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written ({error.strerror}); make room or choose another "
                "folder, and go on with --resume"
            ) from error
        self._unwritten = json.dumps({"start": dict(start)}).encode() + b"\n"

    def add(self, events: Iterable[Mapping[str, int]]) -> int:
        """Append rows, and those that a full disk has refused before.

        Returns:
            The size of the file in bytes.
        """
        self._unwritten += b"".join(json.dumps(event).encode() + b"\n" for event in events)
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(self._unwritten)
            file.flush()
            os.fsync(file.fileno())
            self._unwritten = b""
        return self._path.stat().st_size


def start_facts(run: Run) -> dict[str, int]:
    """Return what must be the same for the numbers to be the same, besides the options."""
    return {
        "replicas": run.layout.num_replicas,
        "microbatches": run.layout.num_microbatches,
        "threads": torch.get_num_threads(),
        "steps": run.num_steps,
    }


def read_events(folder: Path, run: Run) -> list[Recorded]:
    """Read what each replica of an earlier run did, so that a run can do it again.

    Args:
        folder: of the earlier run.
        run: the run that is to do it again; this process has its number of threads already.

    Raises:
        InputError: the file is missing or malformed, or the run was another one.
    """
    path, now = folder / EVENTS, start_facts(run)
    if not path.is_file():
        raise InputError(
            f"--replay {folder}: has no {EVENTS}; name the folder of a run with --strategy "
            f"{run.config.strategy}"
        )
    events: list[dict[str, Any]] = []
    num_starts = 0
    for line in read_bytes(path, MOST_ROWS).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path}: {line[:60]!r} is no event; give a run whose record is whole")
        if "start" not in row:
            events.append(row)
            continue
        num_starts += 1
        for name, value in now.items():
            before = row["start"].get(name) if isinstance(row["start"], dict) else None
            if before != value:
                raise InputError(
                    f"--replay {folder}: has {before} {name}, and this run {value}; the numbers "
                    f"would differ, so give as many"
                )
    if not num_starts or not events:
        raise InputError(f"{path}: has no events; give a run that has come to a checkpoint")
    try:
        return collect(events, run.layout.num_replicas)
    except ValueError as error:
        raise InputError(f"{path}: {error}; give a run whose record is whole") from error
