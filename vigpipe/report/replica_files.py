"""Read what replicas with steps of their own did: events.jsonl and summary.json's "replicas"."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vigpipe.errors import InputError
from vigpipe.files.untrusted import MOST_ROWS, read_text
from vigpipe.job.rows import RATE, unit_in
from vigpipe.replication.diary import DEEDS, Deed
from vigpipe.replication.scaling import Prediction
from vigpipe.report.fields import Fields, parse_object
from vigpipe.run.folder import EVENTS

_EACH = (
    *("items", "samples", "averages", "bytes_sent", "peak_bytes"),
    *("busy_seconds", "waiting_seconds", "averaging_seconds"),
)
_OF_PARTIAL = "partial_items", "partial_busy_seconds"  # earlier versions do not tell them
_BALANCE = ("cv", "imbalance", "efficiency")


class Doing(NamedTuple):
    """What a replica did in a span of time, in seconds since the first span of the run."""

    replica: int
    deed: Deed
    start: float
    end: float


@dataclass(frozen=True)
class ReportedReplicas:
    """What the replicas of a run did; a run that has not finished has only `doings`."""

    doings: tuple[Doing, ...]  # in the order of the file
    each: tuple[dict[str, float], ...]  # counts and seconds of each replica, by name
    balance: dict[str, dict[str, float]]  # how even "items" and "busy" were, by name
    server: dict[str, Any]  # counts and seconds of the server; empty if there is none
    num_replicas: int  # D; spans of a server are those of number D
    prediction: Prediction | None = None  # None if the run does not tell it

    @property
    def has_server(self) -> bool:
        return bool(self.server) or any(d.replica == self.num_replicas for d in self.doings)


def read_replicas(folder: Path, summary: Fields) -> ReportedReplicas | None:
    """Read what the replicas of a run did; None if all of them took every step together."""
    path = folder / EVENTS
    if not path.is_file() and "replicas" not in summary:
        return None
    each, balance, prediction = [], {}, None
    server: dict[str, Any] = {}
    if "replicas" in summary:
        table = summary.object("replicas")
        for number, values in enumerate(table.items("each")):
            own = Fields(values, f"{table.where}, replica {number}")
            index = own.number("replica") if "replica" in own else number
            told = [*_EACH, *(name for name in _OF_PARTIAL if name in own)]
            each.append({"replica": index} | {name: own.number(name) for name in told})
        for what in ("items", "busy"):
            measures = table.object(what)
            balance[what] = {name: measures.number(name) for name in _BALANCE}
        if each and "scaling" in table:
            prediction = _read_prediction(table.object("scaling"), len(each))
        if "server" in table:
            own = table.object("server")
            server = {name: own.number(name) for name in (*_EACH, "updates")}
            by_staleness = own.object("staleness")
            if not all(name.isdecimal() for name in by_staleness.names()):
                raise InputError(f"{by_staleness.where}: expected whole numbers as names")
            server["staleness"] = {s: by_staleness.whole(s) for s in by_staleness.names()}
    doings, num_replicas = _read_doings(path) if path.is_file() else ((), len(each))
    return ReportedReplicas(doings, tuple(each), balance, server, num_replicas, prediction)


def _read_prediction(table: Fields, num_replicas: int) -> Prediction:
    samples, fewer = unit_in(table.names()), "with_one_fewer"
    now = table.number(samples + RATE)
    if now <= 0:
        raise table.wrong(samples + RATE, "above 0")
    with_one_fewer = table.number(fewer) if fewer in table else None
    more = table.number("with_one_more")
    return Prediction(num_replicas, now, more, with_one_fewer, samples.replace("_", " "))


def _read_doings(path: Path) -> tuple[tuple[Doing, ...], int]:
    doings: list[Doing] = []
    num_replicas = 0
    *lines, _ = read_text(path, MOST_ROWS).split("\n")  # the last one may be cut short
    for number, line in enumerate(lines, 1):
        row = parse_object(line, f"{path}, line {number}")
        if "start" in row:
            num_replicas = row.object("start").whole("replicas")
        if "did" not in row:
            continue
        deed = row.text("did")
        if deed not in DEEDS:
            raise InputError(f"{row.where}: did must be one of {', '.join(DEEDS)}, is {deed[:40]}")
        start, end = row.number("from"), row.number("to")
        doings.append(Doing(row.whole("replica"), deed, start, end))
    zero = min((doing.start for doing in doings), default=0.0)
    spans = (d._replace(start=d.start - zero, end=d.end - zero) for d in doings)
    return tuple(spans), num_replicas
