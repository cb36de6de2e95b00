"""Write and read events.jsonl: what replicas with steps of their own did (`replication.record`).

The rows of a start come first, and again whenever the run goes on:

    {"start": {"replicas": 2, "microbatches": 2, "threads": 1, "steps": 80, "data": {...}}}

Rows are written when all replicas rest, with the checkpoint that they lead to.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.files.rows import RowsFile, parse_row
from vigpipe.files.untrusted import MOST_ROWS, read_bytes
from vigpipe.replication.own_steps import make_rules
from vigpipe.replication.promises import check_promises
from vigpipe.replication.record import Recorded, collect
from vigpipe.run.facts import Run
from vigpipe.run.folder import EVENTS, MAKE_ROOM, SUMMARY


class EventsFile:
    """Appends the events of all replicas to `earlier` rows; only one rank of a run has it.

    `start` is None if the earlier rows have the facts of this start, which a lost rank has written.
    """

    def __init__(self, folder: Path, start: Mapping[str, Any] | None, earlier: bytes = b"") -> None:
        self._path = folder / EVENTS
        with told_if_unwritable(str(self._path), MAKE_ROOM):
            with replacing(self._path) as partial:
                partial.write_bytes(earlier)
            self._rows = RowsFile(self._path)
        self.add([] if start is None else [{"start": dict(start)}])

    def add(self, events: Iterable[Mapping[str, Any]]) -> int:
        """Append rows, and those that a full disk has refused before; return the size in bytes."""
        with contextlib.suppress(OSError):
            self._rows.add(events)
        return self._rows.sync()

    def finish(self) -> None:
        """Write the rows that are left, or raise InputError; close the file."""
        with told_if_unwritable(str(self._path), MAKE_ROOM):
            self._rows.finish()


def open_events(run: Run, folder: Path, num_bytes: int | None) -> EventsFile:
    """Open the record of a run, with the first bytes of that of the run that it goes on with."""
    rows = b""
    if num_bytes is not None and run.config.resume is not None:
        place = Path(run.config.resume)  # the earlier run's folder, or one of its checkpoints
        places = [folder] if run.config.resume == "auto" else [place, place.parent.parent]
        earlier = [place / EVENTS for place in places if (place / EVENTS).is_file()]
        rows = read_bytes(earlier[0], MOST_ROWS)[:num_bytes] if earlier else b""
    return EventsFile(folder, start_facts(run), rows)


def take_over_events(run: Run, folder: Path, num_bytes: int | None) -> EventsFile:
    """Go on with the first `num_bytes` of a record whose writer was lost; None if it had none."""
    if num_bytes is None:
        return EventsFile(folder, start_facts(run))
    return EventsFile(folder, None, read_bytes(folder / EVENTS, MOST_ROWS)[:num_bytes])


def start_facts(run: Run, num_threads: int | None = None) -> dict[str, Any]:
    """Return what must be the same for the numbers to be the same, besides the options."""
    return {
        "replicas": run.layout.num_teams,
        "microbatches": run.layout.num_microbatches,
        "threads": num_threads or torch.get_num_threads(),
        "steps": run.num_steps,
        "data": run.fingerprint,
    }


def recorded_replicas(folder: Path) -> int | None:
    """Return how many replicas or hosts took steps of their own in a run, if its record says so."""
    path = folder / EVENTS
    if not path.is_file():
        return None
    first = read_bytes(path, MOST_ROWS).partition(b"\n")[0]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        number = parse_row(first)["start"]["replicas"]
        return number if isinstance(number, int) and number > 0 else None
    return None


def read_events(folder: Path, run: Run, num_threads: int | None = None) -> list[Recorded]:
    """Read what each replica of the run in a folder did, to do it again, or raise InputError."""
    path, now = folder / EVENTS, start_facts(run, num_threads)
    if not path.is_file():
        raise InputError(
            f"--replay {folder}: has no {EVENTS}; name the folder of a run with --strategy "
            f"{run.config.strategy}"
        )
    events: list[dict[str, Any]] = []
    num_starts = 0
    for line in read_bytes(path, MOST_ROWS).splitlines():
        try:
            row = parse_row(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path}: {line[:60]!r} is no event; give a run whose record is whole")
        if "start" not in row:
            events.append(row)
            continue
        num_starts += 1
        for name, value in now.items():
            start = row["start"] if isinstance(row["start"], dict) else {}
            before = start.get(name)
            if name == "data":
                before = start.get(name, start.get("images"))  # as earlier versions called it
            what = f"{before} {name}, and this run {value}"
            if name == "data" and isinstance(before, dict):
                differs = run.differs_in_data(before)
                what = f"other {run.job.unit}: the {differs} differ" if differs else ""
            if before != value and what:
                raise InputError(
                    f"--replay {folder}: has {what}; the numbers would differ, so give the same"
                )
    if not num_starts or not events:
        raise InputError(f"{path}: has no events; give a run that has come to a checkpoint")
    course = replace(run.course, num_replicas=run.layout.num_teams)
    is_whole = (folder / SUMMARY).is_file()  # the run has come to its end
    try:
        recorded = collect(events, run.layout.num_teams)
        rules = make_rules(run.config, course, is_free=False)
        check_promises(recorded, rules, run.config.strategy, is_whole=is_whole)
        return recorded
    except ValueError as error:
        raise InputError(f"{path}: {error}; give a run whose record is whole") from error
