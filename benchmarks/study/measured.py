"""Read the numbers of one run of the experiment, which the tables are made of."""

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
from vigpipe.timing.partial import full_batches
from vigpipe.timing.recorder import PHASES, Phase, Row
from vigpipe.timing.tables import slowest


@dataclass(frozen=True)
class MeasuredRun:
    """The numbers of one run."""

    name: str  # name of the layout
    layout: Layout  # degrees of parallelism
    round_number: int  # number of the round, from 1
    losses: Mapping[int, float]  # training loss by step, of all steps
    # Seconds on the slowest rank, by phase and step (or test batch); timed ones with full batches
    # only.
    step_seconds: Mapping[Phase, Mapping[int, float]]
    # By phase, the seconds of the forward of one block on all micro-batches of a step, one value
    # for every block and timed step.
    block_seconds: Mapping[Phase, Sequence[float]]
    readout_seconds: Mapping[Phase, Sequence[float]]  # by phase, the same seconds of the readout
    # Seconds from the first forward of a test batch to the end of its last, one value for each
    # recorded test batch and replica.
    latency_seconds: Sequence[float]
    bubble: float | None  # share of a step in which ranks wait for one another; None with one stage
    # Seconds of a step spent in adding up gradients, on the stage that takes longest: the least
    # over its copies, which is that of the copy that comes last and waits for no other, and the
    # most, which is that of the copy that comes first.
    all_reduce_seconds: tuple[float, float]
    peak_bytes: Sequence[float]  # peak memory of every rank
    facts: Mapping[str, Any]  # versions, commit, hardware and threads_per_rank


def read_measured(folder: Path, name: str, layout: Layout, round_number: int) -> MeasuredRun:
    """Read the folder of a run of `vigpipe time`.

    Args:
        folder: the run's folder.
        name: name of the layout.
        layout: degrees of parallelism.
        round_number: number of the round, from 1.

    Raises:
        InputError: a file is missing or broken, nothing was timed, or the run still goes on.
    """
    (run,) = read_runs([folder])
    if run.running:
        raise InputError(f"{folder}: a run is still writing to it; wait for its end")
    timing = run.timing
    if run.unfinished or timing is None:
        raise InputError(f"{folder}: {run.unfinished or 'was not timed'}; delete it and start anew")
    rows = full_batches(timing.rows)
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
    slowest_rank: dict[int, float] = {}
    for row in rows:
        if row.phase == phase and row.name == "step":
            slowest_rank[row.step] = max(row.seconds, slowest_rank.get(row.step, 0.0))
    return slowest_rank


def _forward(rows: Sequence[Row], phase: Phase, pattern: str) -> list[float]:
    return [
        value
        for (_, name, direction), values in slowest(rows, phase).items()
        if direction == "forward" and re.fullmatch(pattern, name)
        for value in values
    ]


def _all_reduce(rows: Sequence[Row], layout: Layout) -> tuple[float, float]:
    """Return the least and the most seconds over the copies of the slowest stage, mean of steps."""
    seconds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.phase == "train" and row.name == "all-reduce":
            seconds[layout.pipeline_rank(row.rank)][row.step].append(row.seconds)
    stages = [list(steps.values()) for steps in seconds.values()]
    least = [sum(map(min, steps)) / len(steps) for steps in stages]
    most = [sum(map(max, steps)) / len(steps) for steps in stages]
    return max(least, default=0.0), max(most, default=0.0)


def _latencies(path: Path) -> list[float]:
    """Read the seconds from the first forward of a test batch to the end of its last, by replica.

    They are read from the trace because its ranks have a common clock, unlike those of timing.csv.
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
            f"{path}: is not a trace of vigpipe time ({error}); delete the run and start anew"
        ) from error
    return [
        1e-6 * (max(e for _, e in spans) - min(s for s, _ in spans)) for spans in times.values()
    ]


def _facts(run: ReportedRun) -> dict[str, Any]:
    summary = json.loads(read_text(run.folder / "summary.json"))
    return {key: summary.get(key) for key in ("versions", "commit", "hardware", "threads_per_rank")}
