"""Read what replicas with steps of their own did: events.jsonl and summary.json's "replicas"."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from vigpipe.errors import InputError
from vigpipe.files.untrusted import MOST_ROWS, read_text
from vigpipe.replication.diary import DEEDS, Deed
from vigpipe.report.fields import Fields, parse_object
from vigpipe.run.folder import EVENTS

_EACH = (
    *("items", "samples", "averages", "bytes_sent", "peak_bytes"),
    *("busy_seconds", "waiting_seconds", "averaging_seconds"),
)
_BALANCE = ("cv", "imbalance", "efficiency")


class Doing(NamedTuple):
    """A span of a replica's time.

    Attributes:
        replica: whose it is.
        deed: what the replica did.
        start: when it began, in seconds since the first span of the run.
        end: when it ended.
    """

    replica: int
    deed: Deed
    start: float
    end: float


@dataclass(frozen=True)
class ReportedReplicas:
    """What the replicas of a run did.

    Attributes:
        doings: spans of all replicas, in the order of the file.
        each: counts and seconds of each replica, by name; empty for a run that has not finished.
        balance: how even "items" and "busy" were, by name; likewise.
    """

    doings: tuple[Doing, ...]
    each: tuple[dict[str, float], ...]
    balance: dict[str, dict[str, float]]


def read_replicas(folder: Path, summary: Fields) -> ReportedReplicas | None:
    """Read what the replicas of a run did.

    Args:
        folder: the run's folder.
        summary: its summary.json; empty if the run has not finished.

    Returns:
        What they did; None if all of them took every step together.

    Raises:
        InputError: a file is broken.
    """
    path = folder / EVENTS
    if not path.is_file() and "replicas" not in summary:
        return None
    each, balance = [], {}
    if "replicas" in summary:
        table = summary.object("replicas")
        for number, values in enumerate(table.items("each")):
            own = Fields(values, f"{table.where}, replica {number}")
            each.append({name: own.number(name) for name in _EACH})
        for what in ("items", "busy"):
            measures = table.object(what)
            balance[what] = {name: measures.number(name) for name in _BALANCE}
    doings = _read_doings(path) if path.is_file() else ()
    return ReportedReplicas(doings, tuple(each), balance)


def _read_doings(path: Path) -> tuple[Doing, ...]:
    doings: list[Doing] = []
    *lines, _ = read_text(path, MOST_ROWS).split("\n")  # the last one may be cut short
    for number, line in enumerate(lines, 1):
        row = parse_object(line, f"{path}, line {number}")
        if "did" not in row:
            continue
        deed = row.text("did")
        if deed not in DEEDS:
            raise InputError(f"{row.where}: did must be one of {', '.join(DEEDS)}, is {deed[:40]}")
        start, end = row.number("from"), row.number("to")
        doings.append(Doing(row.whole("replica"), cast("Deed", deed), start, end))
    zero = min((doing.start for doing in doings), default=0.0)
    return tuple(d._replace(start=d.start - zero, end=d.end - zero) for d in doings)
