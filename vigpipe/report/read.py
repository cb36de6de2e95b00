"""Read a run's folder: its options, its metrics, and whether and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_text, read_toml
from vigpipe.report.fields import Fields, parse_object
from vigpipe.report.timing_files import ReportedTiming, read_timing

_ADVICE = "name a folder that vigpipe train wrote"


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step: a row of metrics.jsonl."""

    number: int
    loss: float
    seconds: float
    images_per_second: float


class Evaluation(NamedTuple):
    """Metrics of one pass over the test images; top1 and top5 are shares, from 0 to 1."""

    step: int  # the last optimizer step before the evaluation
    epoch: int
    loss: float
    top1: float
    top5: float
    ema_top1: float | None  # top1 of the moving average of the weights


@dataclass(frozen=True)
class ReportedRun:
    """Everything that the folder of a run holds.

    Attributes:
        name: name of the folder, or its whole path where two runs have folders of one name.
        folder: path of the folder as it was given.
        options: options of config.toml, by name; empty if the file is missing.
        steps: metrics of every optimizer step, in their order.
        evaluations: metrics of every evaluation, in their order.
        summary: content of summary.json; empty for a run that has not finished.
        unfinished: why the run counts as not finished; empty for a finished run.
        timing: content of the timing files; None for a run that was not timed.
    """

    name: str
    folder: Path
    options: dict[str, Any]
    steps: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]
    summary: Fields
    unfinished: str
    timing: ReportedTiming | None


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read the folders of several runs, in the order given.

    Raises:
        InputError: no folder is given, one is given twice, or one holds no run or a broken file.
    """
    if not folders:
        raise InputError(f"vigpipe report: no run was given; {_ADVICE}")
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise InputError(f"{folder}: was given twice; name every run once")
    names = [path.name for path in paths]
    return [
        _read_run(folder, path.name if names.count(path.name) == 1 else str(folder))
        for folder, path in zip(folders, paths, strict=True)
    ]


def _read_run(folder: Path, name: str) -> ReportedRun:
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder}: {problem}; {_ADVICE}")
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
    """Read the rows of metrics.jsonl, and whether its last line was begun but not finished."""
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
            raise InputError(f"{where}: is not text; {_ADVICE}") from error
    return rows, False


def _sort(rows: Sequence[Fields]) -> tuple[tuple[StepMetrics, ...], tuple[Evaluation, ...]]:
    steps: list[StepMetrics] = []
    evaluations: list[Evaluation] = []
    for row in rows:
        if "event" in row:  # of a straggler, a resumption, ...
            continue
        if "step" in row:
            steps.append(
                StepMetrics(
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
    """Say why the ranks failed, by their files; ranks that only lost a peer are left out."""
    paths = sorted(folder.glob("failed-rank*.json"))
    records = [parse_object(read_text(path), str(path)) for path in paths]
    causes = [record for record in records if record.text("kind") == "own"] or records
    rank_of = {record.text("message"): record.whole("rank") for record in reversed(causes)}
    return "".join(f"; rank {rank}: {message}" for message, rank in sorted(rank_of.items()))
