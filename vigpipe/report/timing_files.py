"""Read what a timed run adds: timing.csv, timeline.json and summary.json's "timing"."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from vigpipe.analysis.account import PARTS, Account
from vigpipe.analysis.bubble import Bubble
from vigpipe.errors import InputError
from vigpipe.files.untrusted import MOST_ROWS, read_text
from vigpipe.report.fields import Fields, parse_object
from vigpipe.spans import KINDS, Span
from vigpipe.timing.recorder import PHASES, Row
from vigpipe.timing.tables import DIRECTIONS

_NAMES = [field.name for field in fields(Row)]
COLUMNS = ",".join(_NAMES)
# Earlier versions did not tell how full batches were.
_OLD_COLUMNS = ",".join(_NAMES[:-2])


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on all ranks, as timeline.json holds them."""

    step: int
    microbatches: int
    clock_error_seconds: float  # the times of one event on two ranks may be so far apart
    measured: tuple[Span, ...]
    predicted: tuple[Span, ...]  # by simulation; there may be none


@dataclass(frozen=True)
class ReportedTiming:
    """The timing files of a run; any of them may be missing in a run that did not finish."""

    rows: tuple[Row, ...]  # of timing.csv, which begins after the warm-up
    timeline: Timeline | None
    warmup_steps: int | None  # optimizer steps that the numbers leave out
    overhead: float | None  # share of a step that timing itself costs
    accounts: tuple[Account, ...]  # where the time of a step goes, by rank
    bubble: Bubble | None  # None also if the run has one stage
    peak_bytes: tuple[float, ...]  # of every rank


def read_timing(folder: Path, summary: Fields) -> ReportedTiming | None:
    """Read the timing files of a run; None if it was not timed."""
    rows_file, timeline_file = folder / "timing.csv", folder / "timeline.json"
    if not (rows_file.is_file() or timeline_file.is_file() or "timing" in summary):
        return None
    table = summary.object("timing") if "timing" in summary else Fields({}, "")
    return ReportedTiming(
        rows=_read_rows(rows_file) if rows_file.is_file() else (),
        timeline=_read_timeline(timeline_file) if timeline_file.is_file() else None,
        warmup_steps=table.whole("warmup_steps") if "warmup_steps" in table else None,
        overhead=table.number("overhead") if "overhead" in table else None,
        accounts=_accounts(table) if "accounting" in table else (),
        bubble=_bubble(table.object("bubble")) if "bubble" in table else None,
        peak_bytes=tuple(table.numbers("peak_bytes")) if "peak_bytes" in table else (),
    )


def _read_rows(path: Path) -> tuple[Row, ...]:
    lines = read_text(path, MOST_ROWS).splitlines(keepends=True)
    header = lines[0].strip() if lines else ""
    if header not in (COLUMNS, _OLD_COLUMNS):
        raise InputError(f"{path}: the columns must be {COLUMNS}, are {header[:80] or 'missing'}")
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], 2):
        values = line.strip().split(",")  # no name that vigpipe writes has a comma
        row = _row(values) if len(values) == 1 + header.count(",") else None
        if row is None:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote
            raise InputError(
                f"{path}, line {number}: is not a row of {header}: "
                f"{line.strip()[:80] or 'empty'}; run vigpipe train --timing anew"
            )
        rows.append(row)
    return tuple(rows)


def _row(values: list[str]) -> Row | None:
    try:
        phase, step, rank, replica, stage, name, direction, count, seconds, *of_batch = values
        numbers = (int(step), int(rank), int(replica), int(stage or -1))
        total = float(seconds)
        if phase not in PHASES or direction not in DIRECTIONS or not math.isfinite(total):
            return None
        amounts = map(int, of_batch)
        return Row(phase, *numbers, name, direction, int(count), total, *amounts)
    except ValueError:
        return None


def _read_timeline(path: Path) -> Timeline:
    table = parse_object(read_text(path, MOST_ROWS), str(path))
    return Timeline(
        step=table.whole("step"),
        microbatches=table.whole("microbatches"),
        clock_error_seconds=table.number("clock_error_seconds"),
        measured=_spans(table, "measured"),
        predicted=_spans(table, "predicted"),
    )


def _spans(table: Fields, name: str) -> tuple[Span, ...]:
    spans = []
    for number, item in enumerate(table.items(name)):
        where = f"{table.where}: {name}[{number}]"
        if not isinstance(item, list) or len(item) != len(Span._fields):
            raise InputError(f"{where} must be [{', '.join(Span._fields)}]")
        values = Fields(dict(zip(Span._fields, item, strict=True)), where)
        kind = values.text("kind")
        if kind not in KINDS:
            raise InputError(f"{where}: kind must be one of {', '.join(KINDS)}, is {kind[:40]!r}")
        start, end = values.number("start"), values.number("end")
        if end < start:
            raise InputError(f"{where}: ends at {end} before it starts at {start}")
        stage, microbatch = (int(values.number(key)) for key in ("stage", "microbatch"))
        rank = values.whole("rank")
        spans.append(Span(rank, kind, start, end, stage, microbatch))
    return tuple(spans)


def _accounts(table: Fields) -> tuple[Account, ...]:
    accounts = []
    for number, item in enumerate(table.items("accounting")):
        entry = Fields(item, f"{table.where}, accounting[{number}]")
        accounts.append(
            Account(
                rank=entry.whole("rank"),
                replica=entry.whole("replica"),
                stages=tuple(int(stage) for stage in entry.numbers("stages")),
                step_seconds=entry.number("step_seconds"),
                # Files from before 0.2 have no "wait end": ranks did not wait for each other then.
                seconds={part: entry.number(part) if part in entry else 0.0 for part in PARTS},
            )
        )
    return tuple(accounts)


def _bubble(table: Fields) -> Bubble:
    return Bubble(**{field.name: table.number(field.name) for field in fields(Bubble)})
