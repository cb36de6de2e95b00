"""Read what a timed run adds: timing.csv, timeline.json and summary.json's "timing"."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from vigpipe.errors import InputError
from vigpipe.files.untrusted import MOST_ROWS, read_text
from vigpipe.report.fields import Fields, parse_object
from vigpipe.spans import KINDS, Kind, Span
from vigpipe.timing.recorder import PHASES, Phase, Row
from vigpipe.timing.tables import DIRECTIONS

COLUMNS = ",".join(field.name for field in fields(Row))
PARTS = (
    "compute",
    "wait input",
    "wait gradient",
    "wait end",
    "send",
    "all-reduce",
    "optimizer",
    "other",
    "unaccounted",
)
REASONS = ("fill_and_drain", "imbalance", "variation", "transfer")


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks.

    Attributes:
        step: its number.
        microbatches: of a replica.
        clock_error_seconds: how far the times of one event on two ranks may be apart.
        measured: what happened.
        predicted: what was expected; may be empty.
    """

    step: int
    microbatches: int
    clock_error_seconds: float
    measured: tuple[Span, ...]
    predicted: tuple[Span, ...]


@dataclass(frozen=True)
class Account:
    """Where one rank's step went: means in seconds, which add up to it."""

    rank: int
    replica: int
    stages: tuple[int, ...]
    step_seconds: float
    seconds: dict[str, float]  # of every one of PARTS


@dataclass(frozen=True)
class Bubble:
    """Shares of a step; None where the run could not tell."""

    measured: float | None
    formula: float | None
    reasons: dict[str, float | None]  # of every one of REASONS


@dataclass(frozen=True)
class Timing:
    """What is known of a run's time; each part may be missing in a run that did not finish.

    Attributes:
        rows: of timing.csv, which begins after the warm-up.
        timeline: one step of all ranks.
        warmup_steps: optimizer steps that the numbers leave out; None in an unfinished run.
        step_seconds: mean, std, min, max, median, p95 and count of the training step.
        overhead: share of a step that the instrumentation costs.
        accounts: one a rank.
        bubble: measured and explained.
        peak_bytes: of every rank.
    """

    rows: tuple[Row, ...]
    timeline: Timeline | None
    warmup_steps: int | None
    step_seconds: dict[str, float]
    overhead: float | None
    accounts: tuple[Account, ...]
    bubble: Bubble | None
    peak_bytes: tuple[float, ...]


def read_timing(folder: Path, summary: Fields) -> Timing | None:
    """Read the files of a timed run; None where there is none of them.

    Raises:
        InputError: a file is broken.
    """
    table, picture = folder / "timing.csv", folder / "timeline.json"
    if not (table.is_file() or picture.is_file() or "timing" in summary):
        return None
    known = summary.object("timing") if "timing" in summary else Fields({}, "")
    return Timing(
        rows=_read_rows(table) if table.is_file() else (),
        timeline=_read_timeline(picture) if picture.is_file() else None,
        warmup_steps=known.whole("warmup_steps") if "warmup_steps" in known else None,
        step_seconds=_all_numbers(known.object("step_seconds")) if "step_seconds" in known else {},
        overhead=_optional(known, "overhead"),
        accounts=_accounts(known) if "accounting" in known else (),
        bubble=_bubble(known.object("bubble")) if "bubble" in known else None,
        peak_bytes=tuple(known.numbers("peak_bytes")) if "peak_bytes" in known else (),
    )


def _read_rows(path: Path) -> tuple[Row, ...]:
    lines = read_text(path, MOST_ROWS).splitlines(keepends=True)
    header = lines[0].strip() if lines else ""
    if header != COLUMNS:
        raise InputError(f"{path}: the columns must be {COLUMNS}, are {header[:80] or 'missing'}")
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], 2):
        row = _row(line.strip().split(","))  # no name of ours has a comma
        if row is None:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote
            raise InputError(
                f"{path}, line {number}: is no row of {COLUMNS}: {line.strip()[:80] or 'empty'}; "
                "run vigpipe train --timing anew"
            )
        rows.append(row)
    return tuple(rows)


def _row(values: list[str]) -> Row | None:
    """A line of timing.csv; None if it is none."""
    try:
        phase, step, rank, replica, stage, name, direction, count, seconds = values
        whole = (int(step), int(rank), int(replica), int(stage or -1))
        total = float(seconds)
        if phase not in PHASES or direction not in DIRECTIONS or not math.isfinite(total):
            return None
        return Row(cast(Phase, phase), *whole, name, direction, int(count), total)
    except ValueError:
        return None


def _read_timeline(path: Path) -> Timeline:
    known = parse_object(read_text(path, MOST_ROWS), str(path))
    return Timeline(
        step=known.whole("step"),
        microbatches=known.whole("microbatches"),
        clock_error_seconds=known.number("clock_error_seconds"),
        measured=_spans(known, "measured"),
        predicted=_spans(known, "predicted"),
    )


def _spans(known: Fields, name: str) -> tuple[Span, ...]:
    spans = []
    for number, item in enumerate(known.items(name)):
        where = f"{known.where}: {name}[{number}]"
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
        span = Span(values.whole("rank"), cast(Kind, kind), start, end, stage, microbatch)
        spans.append(span)
    return tuple(spans)


def _accounts(known: Fields) -> tuple[Account, ...]:
    accounts = []
    for number, item in enumerate(known.items("accounting")):
        row = Fields(item, f"{known.where}, accounting[{number}]")
        accounts.append(
            Account(
                rank=row.whole("rank"),
                replica=row.whole("replica"),
                stages=tuple(int(stage) for stage in row.numbers("stages")),
                step_seconds=row.number("step_seconds"),
                # Before 0.2 ranks did not wait for each other at the end.
                seconds={part: row.number(part) if part in row else 0.0 for part in PARTS},
            )
        )
    return tuple(accounts)


def _bubble(known: Fields) -> Bubble:
    return Bubble(
        _optional(known, "measured"),
        _optional(known, "formula"),
        {reason: _optional(known, reason) for reason in REASONS},
    )


def _all_numbers(known: Fields) -> dict[str, float]:
    return {name: known.number(name) for name in known.names() if name in known}


def _optional(known: Fields, name: str) -> float | None:
    return known.number(name) if name in known else None
