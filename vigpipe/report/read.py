"""Read a run's folder: what it was told to do, how it went, and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_text, read_toml
from vigpipe.report.fields import Fields, parse_object
from vigpipe.report.timing_files import Timing, read_timing

_ADVICE = "name a folder that vigpipe train wrote"


class Step(NamedTuple):
    """One optimizer step."""

    number: int
    loss: float
    seconds: float
    images_per_second: float


class Evaluation(NamedTuple):
    """One pass over the test images; shares, not per cent."""

    step: int  # the last one before it
    epoch: int
    loss: float
    top1: float
    top5: float
    ema_top1: float | None  # of the weights' moving average


@dataclass(frozen=True)
class ReportedRun:
    """What a folder holds.

    Attributes:
        name: the folder's, or its whole path where two are alike.
        folder: as it was given.
        options: config.toml; empty if the file is missing.
        steps: in their order.
        evaluations: likewise.
        summary: summary.json; empty for a run that has not finished.
        unfinished: why the run counts as not finished; empty if it did.
        timing: what a timed run adds; None where there is nothing of it.
    """

    name: str
    folder: Path
    options: dict[str, Any]
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    summary: Fields
    unfinished: str
    timing: Timing | None


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read every run, in the order given.

    Raises:
        InputError: no folder, one given twice, or one that is no run or has a broken file.
    """
    if not folders:
        raise InputError(f"vigpipe report: no run was given; {_ADVICE}")
    places = [folder.resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise InputError(f"{folder}: was given twice; name every run once")
    names = [place.name for place in places]
    return [
        _read_run(folder, place.name if names.count(place.name) == 1 else str(folder))
        for folder, place in zip(folders, places, strict=True)
    ]


def _read_run(folder: Path, name: str) -> ReportedRun:
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder}: {found}; {_ADVICE}")
    if not (folder / "metrics.jsonl").is_file():
        raise InputError(f"{folder}: holds no run, for it has no metrics.jsonl; {_ADVICE}")
    rows, torn = _read_rows(folder / "metrics.jsonl")
    summary = folder / "summary.json"
    finished = summary.is_file()
    fields = parse_object(read_text(summary), str(summary)) if finished else Fields({}, "")
    steps, evaluations = _sort(rows)
    unfinished = ""
    if torn or not finished:
        lacks = [] if finished else ["there is no summary.json"]
        lacks += ["the last line of metrics.jsonl is torn"] * torn
        last = f"after step {steps[-1].number}" if steps else "before its first step"
        unfinished = f"it ended {last}: {' and '.join(lacks)}{_causes(folder)}"
    return ReportedRun(
        name=name,
        folder=folder,
        options=_read_options(folder / "config.toml"),
        steps=steps,
        evaluations=evaluations,
        summary=fields,
        unfinished=unfinished,
        timing=read_timing(folder, fields),
    )


def _read_rows(path: Path) -> tuple[list[Fields], bool]:
    """The rows, and whether a last one was begun but not finished."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {_ADVICE}") from error
    rows = []
    *lines, rest = content.split(b"\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        where = f"{path}, line {number}"
        try:
            rows.append(parse_object(line.decode("utf-8"), where))
        except ValueError as error:  # InputError is one too
            if line is rest:  # an object cut short never parses
                return rows, True
            if isinstance(error, InputError):
                raise
            raise InputError(f"{where}: is no text; {_ADVICE}") from error
    return rows, False


def _sort(rows: Sequence[Fields]) -> tuple[tuple[Step, ...], tuple[Evaluation, ...]]:
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    for row in rows:
        if "event" in row:  # beside the steps: a straggler, a resumption
            continue
        if "step" in row:
            steps.append(
                Step(
                    row.whole("step"),
                    row.number("loss"),
                    row.number("step_seconds"),
                    row.number("images_per_second"),
                )
            )
            continue
        average = row.object("ema").number("top1") if "ema" in row else None
        evaluations.append(
            Evaluation(
                steps[-1].number if steps else 0,
                row.whole("epoch"),
                row.number("loss"),
                row.number("top1"),
                row.number("top5"),
                average,
            )
        )
    return tuple(steps), tuple(evaluations)


def _read_options(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_toml(path)
    except InputError as error:
        raise InputError(f"{error}; {_ADVICE}") from error


def _causes(folder: Path) -> str:
    """What the ranks that failed have left, in words: the cause rather than who lost a peer."""
    paths = sorted(folder.glob("failed-rank*.json"))
    records = [parse_object(read_text(path), str(path)) for path in paths]
    own = [record for record in records if record.text("kind") == "own"]
    told = {record.text("message"): record.whole("rank") for record in reversed(own or records)}
    return "".join(f"; rank {rank}: {message}" for message, rank in sorted(told.items()))
