"""Read a run's folder: its options, its metrics, and whether it goes on, or how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_text, read_toml
from vigpipe.job.rows import FULL_BATCH, PARTIAL_BATCH, RATE, Fill, unit_in
from vigpipe.job.score import SHARES
from vigpipe.report.fields import Fields, parse_object
from vigpipe.report.replica_files import ReportedReplicas, read_replicas
from vigpipe.report.timing_files import ReportedTiming, read_timing
from vigpipe.run.folder import is_locked

_ADVICE = "name a folder that vigpipe train wrote"


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step: a row of metrics.jsonl."""

    number: int
    epoch: int
    loss: float
    lr: float
    seconds: float
    per_second: float  # images or nodes
    data_seconds: float | None = None  # runs of earlier versions do not tell it
    unit: str = "images"
    training_nodes: float | None = None  # a graph's; its other nodes have no part in the loss
    partial: Fill | None = None  # None also in runs of earlier versions, which do not tell it

    @property
    def num_processed(self) -> float:
        """Number of images, or nodes, of the step over all replicas, up to rounding."""
        return self.seconds * self.per_second

    @property
    def samples(self) -> float:
        """What the loss is the mean of: images or training nodes, up to rounding."""
        return self.num_processed if self.training_nodes is None else self.training_nodes


class SplitScore(NamedTuple):
    """The score of test or validation samples."""

    loss: float
    shares: dict[str, float]  # from 0 to 1, the main one first: top1 of images, accuracy of nodes
    average: float | None = None  # the main share of the moving average of the weights

    @property
    def main(self) -> float:
        """The share that says best how good the weights are."""
        return next(iter(self.shares.values()))


class Evaluation(NamedTuple):
    """One evaluation, at the end of an epoch: a row of metrics.jsonl."""

    step: int  # the last optimizer step before it
    epoch: int
    training_loss: float | None  # mean over the training samples of the epoch
    unit: str  # what is scored: images or nodes
    test: SplitScore
    validation: SplitScore | None = None


class Resumption(NamedTuple):
    """When a run went on, and how many replicas it had until then: a row of metrics.jsonl."""

    after_step: int
    replicas_before: int | None  # runs of earlier versions do not tell it


@dataclass(frozen=True)
class ReportedRun:
    """Everything that the folder of a run holds."""

    name: str  # of the folder, or its whole path where two runs have folders of one name
    folder: Path
    options: dict[str, Any]  # of config.toml; empty if the file is missing
    steps: tuple[StepMetrics, ...]  # of replica 0, where replicas take steps of their own
    evaluations: tuple[Evaluation, ...]
    summary: Fields  # of summary.json; empty for a run that has not finished
    running: bool  # whether its process holds the folder's lock
    unfinished: str  # how it ended before its time; empty for a finished or a running one
    timing: ReportedTiming | None  # None for a run that was not timed
    replicas: ReportedReplicas | None = None  # None if all took every step together
    steps_of_others: dict[int, tuple[StepMetrics, ...]] = field(default_factory=dict)  # by replica
    resumptions: tuple[Resumption, ...] = ()

    @property
    def unit(self) -> str:
        """What the run counts: images or nodes; images as long as it does not tell."""
        return next((row.unit for row in (*self.steps[:1], *self.evaluations[:1])), "images")

    @property
    def told_shares(self) -> list[str]:
        """The shares of its scores, the main one first, but for those that tell nothing more.

        Of a node with one class, micro-F1 is the accuracy; of five classes or fewer, top-5 is 1.
        """
        scores = [row.test for row in self.evaluations]
        same = {"micro_f1": lambda score: score.main, "top5": lambda _: 1.0}
        return [
            name
            for name in (scores[0].shares if scores else ())
            if name not in same or any(score.shares[name] != same[name](score) for score in scores)
        ]


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read the folders of several runs, in the order given; raises InputError if one is broken."""
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
    # Asked before the files are read: a run that ends in between has written all of them.
    running = is_locked(folder)
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    if not running and not metrics.is_file():
        raise InputError(f"{folder}: holds no run, for it has no metrics.jsonl; {_ADVICE}")
    rows, torn = _read_rows(metrics) if metrics.is_file() else ([], False)
    # A summary beside a run that goes on is of what came before it.
    finished = summary.is_file() and not running
    fields = parse_object(read_text(summary), str(summary)) if finished else Fields({}, "")
    steps_of, evaluations = _sort(rows)
    steps = steps_of.pop(0, ())
    unfinished = ""
    if not running and (torn or not finished):
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
        running=running,
        unfinished=unfinished,
        timing=read_timing(folder, fields),
        replicas=read_replicas(folder, fields),
        steps_of_others=steps_of,
        resumptions=_resumptions(rows),
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


def _sort(
    rows: Sequence[Fields],
) -> tuple[dict[int, tuple[StepMetrics, ...]], tuple[Evaluation, ...]]:
    """Return the steps of each replica, 0 where a row names none, and the evaluations."""
    steps_of: dict[int, list[StepMetrics]] = {}
    evaluations: list[Evaluation] = []
    for row in rows:
        if "event" in row:  # such as a resumption
            continue
        if "step" in row:
            replica = row.whole("replica") if "replica" in row else 0
            unit = unit_in(row.names())
            steps_of.setdefault(replica, []).append(
                StepMetrics(
                    number=row.whole("step"),
                    loss=row.number("loss"),
                    lr=row.number("lr"),
                    seconds=row.number("step_seconds"),
                    per_second=row.number(unit + RATE),
                    epoch=row.whole("epoch"),
                    data_seconds=row.number("data_seconds") if "data_seconds" in row else None,
                    unit=unit,
                    training_nodes=row.number("training_nodes") if unit == "nodes" else None,
                    partial=Fill(row.whole(PARTIAL_BATCH), row.whole(FULL_BATCH))
                    if PARTIAL_BATCH in row
                    else None,
                )
            )
            continue
        validation = row.object("validation") if "validation" in row else None
        unit = next((unit for unit in SHARES if unit in row), "images")
        evaluations.append(
            Evaluation(
                step=steps_of[0][-1].number if 0 in steps_of else 0,
                epoch=row.whole("epoch"),
                training_loss=row.number("training_loss") if "training_loss" in row else None,
                unit=unit,
                test=_score(row, unit),
                validation=None if validation is None else _score(validation, unit),
            )
        )
    return {replica: tuple(steps) for replica, steps in steps_of.items()}, tuple(evaluations)


def _resumptions(rows: Sequence[Fields]) -> tuple[Resumption, ...]:
    name = "replicas_before"
    return tuple(
        Resumption(row.whole("step"), row.whole(name) if name in row else None)
        for row in rows
        if "event" in row and row.text("event") == "resumed"
    )


def _score(scores: Fields, unit: str) -> SplitScore:
    names = SHARES[unit]
    average = scores.object("ema").number(names[0]) if "ema" in scores else None
    return SplitScore(scores.number("loss"), {n: scores.number(n) for n in names}, average)


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
