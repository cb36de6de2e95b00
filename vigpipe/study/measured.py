"""What one run of the experiment has shown: the numbers that the tables are made of."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError
from vigpipe.files.untrusted import MOST_ROWS, read_text
from vigpipe.parallel.layout import Layout
from vigpipe.report.fields import parse_object
from vigpipe.report.read import ReportedRun, read_runs
from vigpipe.timing.recorder import PHASES, Phase, Row
from vigpipe.timing.tables import slowest


@dataclass(frozen=True)
class MeasuredRun:
    """A run's numbers; seconds.

    Attributes:
        name: of its layout.
        layout: the degrees.
        round_number: from 1.
        losses: by step, of all steps.
        step_seconds: by phase and step, or test batch, of those timed: of the slowest rank.
        block_seconds: by phase, forward of one block on all micro-batches of a step; every block
            of every timed step.
        readout_seconds: likewise of the readout.
        latency_seconds: of test batches that were recorded closely, from their first forward to
            their last; of one replica's share.
        bubble: share of a step that ranks wait for one another; None on one stage.
        all_reduce_seconds: of a step, least and most: of the stage that takes longest, on the copy
            that comes last, which waits for nobody, and on the one that comes first.
        peak_bytes: of every rank.
        facts: provenance: versions, commit, hardware, threads_per_rank.
    """

    name: str
    layout: Layout
    round_number: int
    losses: Mapping[int, float]
    step_seconds: Mapping[Phase, Mapping[int, float]]
    block_seconds: Mapping[Phase, Sequence[float]]
    readout_seconds: Mapping[Phase, Sequence[float]]
    latency_seconds: Sequence[float]
    bubble: float | None
    all_reduce_seconds: tuple[float, float]
    peak_bytes: Sequence[float]
    facts: Mapping[str, Any]


def read_measured(folder: Path, name: str, layout: Layout, round_number: int) -> MeasuredRun:
    """Read the folder of a run of `vigpipe time`.

    Raises:
        InputError: a file is missing or broken, or nothing was timed.
    """
    (run,) = read_runs([folder])
    timing = run.timing
    if run.unfinished or timing is None:
        raise InputError(f"{folder}: {run.unfinished or 'was not timed'}; delete it and start anew")
    rows = timing.rows
    steps: dict[Phase, dict[int, float]] = {phase: _steps(rows, phase) for phase in PHASES}
    if not all(steps.values()):
        raise InputError(f"{folder}: holds no timed step of both phases; delete it and start anew")
    return MeasuredRun(
        name=name,
        layout=layout,
        round_number=round_number,
        losses={step.number: step.loss for step in run.steps},
        step_seconds=steps,
        block_seconds={phase: _forward(rows, phase, r"block \d+") for phase in PHASES},
        readout_seconds={phase: _forward(rows, phase, "readout") for phase in PHASES},
        latency_seconds=_latencies(folder / "trace.json"),
        bubble=timing.bubble.measured if timing.bubble else None,
        all_reduce_seconds=_all_reduce(rows, layout),
        peak_bytes=timing.peak_bytes,
        facts=_facts(run),
    )


def _steps(rows: Sequence[Row], phase: Phase) -> dict[int, float]:
    found: dict[int, float] = {}
    for row in rows:
        if row.phase == phase and row.name == "step":
            found[row.step] = max(row.seconds, found.get(row.step, 0.0))
    return found


def _forward(rows: Sequence[Row], phase: Phase, pattern: str) -> list[float]:
    return [
        value
        for (_, name, direction), values in slowest(rows, phase).items()
        if direction == "forward" and re.fullmatch(pattern, name)
        for value in values
    ]


def _all_reduce(rows: Sequence[Row], layout: Layout) -> tuple[float, float]:
    """Least and most over the copies of a stage, mean over the steps, of the longest stage."""
    seconds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.phase == "train" and row.name == "all-reduce":
            seconds[layout.pipeline_rank(row.rank)][row.step].append(row.seconds)
    stages = [list(steps.values()) for steps in seconds.values()]
    least = [sum(map(min, steps)) / len(steps) for steps in stages]
    most = [sum(map(max, steps)) / len(steps) for steps in stages]
    return max(least, default=0.0), max(most, default=0.0)


def _latencies(path: Path) -> list[float]:
    """Seconds from the first forward of a test batch to the end of its last, a replica at a time.

    timing.csv has no clock in common; the trace has one.
    """
    trace = parse_object(read_text(path, MOST_ROWS), str(path))
    times: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    try:
        for event in trace.items("traceEvents"):
            if event.get("cat") != "span" or event["args"]["phase"] != "test":
                continue
            if event["name"].startswith("forward"):
                batch = (event["pid"], event["args"]["step"])
                times[batch].append((event["ts"], event["ts"] + event["dur"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: is no trace of vigpipe time ({error}); delete the run and start anew"
        ) from error
    return [1e-6 * (max(e for _, e in own) - min(s for s, _ in own)) for own in times.values()]


def _facts(run: ReportedRun) -> dict[str, Any]:
    known = json.loads(read_text(run.folder / "summary.json"))
    return {key: known.get(key) for key in ("versions", "commit", "hardware", "threads_per_rank")}
