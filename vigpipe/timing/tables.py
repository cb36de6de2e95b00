"""Make tables from the rows of timing.csv: the time of steps, stages, blocks and their parts."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from tabulate import tabulate

from vigpipe.files.atomic import replacing
from vigpipe.spans import COMPUTE, KINDS
from vigpipe.timing.partial import full_batches, step_by_step
from vigpipe.timing.recorder import PHASES, Phase, Row

Key = tuple[int, str, str]  # stage, name, direction

OF_RANKS = ("step", "between steps", *KINDS)  # names that are about a rank and not about the model
DIRECTIONS = ("", "forward", "recompute", "backward")


@dataclass(frozen=True)
class Statistics:
    """Statistics of the seconds that something took, one value per step."""

    mean: float
    std: float  # of the sample; 0 for a single value
    min: float
    max: float
    median: float
    p95: float  # the 95th percentile
    count: int


def statistics(seconds: Sequence[float]) -> Statistics:
    """Compute the statistics of at least one value in seconds."""
    values = np.asarray(seconds, dtype=float)
    return Statistics(
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        min=float(values.min()),
        max=float(values.max()),
        median=float(np.median(values)),
        p95=float(np.quantile(values, 0.95)),
        count=len(values),
    )


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write rows as timing.csv, which a reader meanwhile finds whole or not at all."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Row)])
        for row in rows:
            writer.writerow((asdict(row) | {"seconds": f"{row.seconds:.9f}"}).values())


def slowest(rows: Iterable[Row], phase: Phase) -> dict[Key, list[float]]:
    """Return the seconds of every name, step by step, of the rank that took longest.

    Steps with partial batches are left out, unless the phase has no others.
    """
    of_phase = (row for row in full_batches(rows) if row.phase == phase)
    return step_by_step(of_phase, lambda row: (row.stage, row.name, row.direction))


def step_statistics(rows: Iterable[Row], phase: Phase) -> Statistics | None:
    """Compute the statistics of whole steps, as `slowest` takes them; None without any."""
    steps = slowest(rows, phase).get((-1, "step", ""))
    return statistics(steps) if steps else None


def tables(rows: Sequence[Row]) -> str:
    """Write Markdown tables of everything that was timed, for training and test apart."""
    parts: list[str] = []
    for phase, title in zip(PHASES, ("Training steps", "Test batches"), strict=True):
        seconds = slowest(rows, phase)
        of_ranks = [key for key in seconds if key[1] in OF_RANKS]
        of_ranks.sort(key=lambda key: (key[0], OF_RANKS.index(key[1])))
        regions = [key for key in seconds if key[1] not in OF_RANKS]
        regions.sort(key=lambda key: (_place(key[1]), DIRECTIONS.index(key[2])))
        for keys, what in (
            (of_ranks, "milliseconds a step, of the slowest rank"),
            (regions, "the parts of the model, milliseconds a step (all micro-batches)"),
        ):
            if keys:
                parts += [f"### {title}, {what}", _table(keys, seconds)]
    return "\n\n".join(parts)


def study_table(rows: Sequence[Row], fmt: str = "simple") -> str:
    """Write a table like the study's: seconds of a mini-batch, every stage, a block, the readout.

    J. Raffi, "Distributed Graph Neural Network" (Pisa, 2024), tables 1 to 9: mean, standard
    deviation, minimum and maximum, for training and test apart. `fmt` is a format of tabulate, such
    as `simple` or `github`.
    """
    lines: list[tuple[str, ...]] = []
    for phase in PHASES:
        seconds = slowest(rows, phase)
        blocks = [
            value
            for (_, name, direction), values in seconds.items()
            if re.fullmatch(r"block \d+", name) and direction == "forward"
            for value in values
        ]
        named = {
            "mini-batch": seconds.get((-1, "step", "")),
            **{
                f"stage {stage}, computing": _added(seconds, stage)
                for stage in sorted({stage for stage, name, _ in seconds if name == "forward"})
            },
            "one block, forward": blocks,
            "readout, forward": next(
                (v for (_, n, d), v in seconds.items() if (n, d) == ("readout", "forward")), None
            ),
        }
        for name, values in named.items():
            if values:
                s = statistics(values)
                numbers = (s.mean, s.std, s.min, s.max)
                lines.append((phase, name, *(f"{x:.4f}" for x in numbers), str(s.count)))
    headers = ["phase", "seconds of", "mean", "std", "min", "max", "count"]
    return tabulate(lines, headers=headers, tablefmt=fmt, disable_numparse=True)


def _added(seconds: Mapping[Key, list[float]], stage: int) -> list[float]:
    """Add up the seconds of a stage's forwards and backwards in every step."""
    by_kind = [seconds[key] for kind in COMPUTE if (key := (stage, kind, "")) in seconds]
    return [sum(values) for values in zip(*by_kind, strict=True)]


def _place(name: str) -> tuple[int, int, str]:
    """Return a key to sort regions by: the stem, the blocks by number, the readout, the loss."""
    block = re.match(r"block (\d+)", name)
    first = name.split("/")[0]
    order = ("stem", "block", "readout", "loss")
    place = order.index("block" if block else first) if block or first in order else len(order)
    return place, int(block[1]) if block else 0, name


def _table(keys: Sequence[Key], seconds: Mapping[Key, list[float]]) -> str:
    lines = []
    for stage, name, direction in keys:
        s = statistics(seconds[stage, name, direction])
        numbers = (s.mean, s.std, s.min, s.max, s.median, s.p95)
        key = ("" if stage < 0 else str(stage), name, direction)
        lines.append((*key, *(f"{1e3 * x:.3f}" for x in numbers), str(s.count)))
    headers = ["stage", "", "", "mean", "std", "min", "max", "median", "p95", "steps"]
    align = ("right", "left", "left", *["right"] * 7)
    return tabulate(
        lines, headers=headers, tablefmt="github", disable_numparse=True, colalign=align
    )
