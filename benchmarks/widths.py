"""How much memory and time do sub-networks take, by the width of the model that they make up?

A few steps of `vigpipe train` for each width and number of sub-networks; what vigpipe refuses, and
what fails, is a row of the table. Besides, the steps of one sub-model alone, in this process.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.narrow import time_narrow
from benchmarks.options import WidthsBench
from benchmarks.side_by_side import NUM_WARMUP
from benchmarks.trained import (
    PEAK,
    Failure,
    Question,
    Table,
    TrainedRun,
    check_graph_model,
    check_left_out,
    largest_peak,
    parse_numbers,
    slowest_step,
)
from vigpipe.errors import DONE, WRONG_INPUT, InputError
from vigpipe.run.folder import METRICS, WEIGHTS
from vigpipe.run.follow import parse_rows

WANTED = 0.8  # of what fewer FLOPs promise
_OF_RUNS = ("width", "dp", "strategy", "evaluate_every")
_WHOLE, _WITHOUT = "step alone", "without optimizer"
_OWN = ("average_every", "widths", "replicas", "alone_width", "repeats")


class Row(NamedTuple):
    """A row of rows.csv: of a run, or of a step of a sub-model alone."""

    what: str  # a run, or a kind of step of a sub-model alone
    width: int  # of the wide model
    replicas: int  # m
    repeat: int | None = None  # number of a step of a sub-model alone
    # Of a step; of a run the median of the slowest replica's, with their data. None if it has
    # failed.
    seconds: float | None = None
    # Largest memory of a rank; None if the run has failed, and of a sub-model alone.
    peak_bytes: int | None = None
    flops: int | None = None  # of a step of a sub-model alone
    exit_code: int | None = None  # of a run
    sentence: str = ""  # with which it has failed


def _plan(options: WidthsBench) -> list[TrainedRun]:
    check_graph_model(options.model)
    check_left_out(options, WidthsBench(), _OF_RUNS, "is chosen for every run")
    widths, replicas = (parse_numbers(n, getattr(options, n)) for n in ("widths", "replicas"))
    if options.alone_width < 0 or options.repeats < 1:
        raise InputError(
            f"--alone-width {options.alone_width} --repeats {options.repeats}: must be at least 0 "
            "and 1"
        )
    if any(options.alone_width % m for m in replicas):
        raise InputError(
            f"--alone-width {options.alone_width}: must be a multiple of every number in "
            f"--replicas {options.replicas}"
        )
    return [_run(options, width, m) for width in widths for m in replicas]


def _run(options: WidthsBench, width: int, replicas: int) -> TrainedRun:
    # Evaluated once, at the end.
    chosen: dict[str, object] = {"width": width, "evaluate_every": options.steps}
    if replicas > 1:
        chosen |= {"strategy": "subnetworks", "dp": replicas}
        chosen["average_every"] = options.average_every
    name = f"width {width}, m = {replicas}"
    return TrainedRun(name, f"{width}-{replicas}", chosen, (width, replicas))


def _read(options: WidthsBench, run: TrainedRun, out: Path, summary: Mapping[str, Any]) -> Row:
    _remove_weights(out)
    seconds = slowest_step(parse_rows((out / METRICS).read_bytes()))
    peak = largest_peak(summary)
    return Row("run", *run.case, seconds=seconds, peak_bytes=peak, exit_code=DONE)


def _remove_weights(out: Path) -> None:
    """Remove what a run has saved: of wide models it fills a disk."""
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / WEIGHTS).unlink(missing_ok=True)


def _failed(run: TrainedRun, out: Path, failure: Failure) -> Row:
    _remove_weights(out)
    return Row("run", *run.case, exit_code=failure.code, sentence=failure.sentence)


def _cells(row: Row) -> tuple[str, str, str]:
    """Return memory, seconds and what went wrong."""
    if row.seconds is None or row.peak_bytes is None:
        why = "refused" if row.exit_code == WRONG_INPUT else f"exit code {row.exit_code}"
        return "–", "–", f"{why}: {row.sentence}"
    return f"{row.peak_bytes / 2**20:,.0f} MiB", f"{row.seconds:.3f}", ""


def _alone(options: WidthsBench, runs: Sequence[Row]) -> list[Row]:
    """Time the steps of sub-models alone.

    It comes after the runs: Linux takes the peak memory of this process for that of a child.
    """
    if not options.alone_width:
        return []
    numbers = sorted({1, *parse_numbers("replicas", options.replicas)})
    return [
        Row(kind, options.alone_width, narrow.m, i, seconds, flops=narrow.flops)
        for narrow in time_narrow(options, numbers)
        for kind, step in ((_WHOLE, narrow.whole), (_WITHOUT, narrow.without))
        for i, seconds in enumerate(step)
    ]


def _page(options: WidthsBench, rows: Sequence[Row], folder: Path) -> tuple[str, list[Table]]:
    headers = ["width", "m", "peak memory a rank", "s a step", ""]
    cells = [(f"{r.width:,}", str(r.replicas), *_cells(r)) for r in rows if r.what == "run"]
    tables = [Table("Runs", headers, cells)]
    words = (
        f"{options.model}, {options.layers} layers, on {options.data}: {options.steps} steps, in "
        f"rounds of {options.average_every}, and one evaluation. m = 1 is a model that is trained "
        "as a whole; otherwise each of m ranks on this host trains an m-th of the channels. "
        f"Seconds are the median of the slowest rank's steps, with their data. {PEAK} What vigpipe "
        "refuses has a row with its sentence."
    )
    if options.alone_width:
        tables.append(_table_alone(options, rows))
        words += (
            f" Below, one sub-model by itself, in one process with one thread: steps of all m take "
            f"turns, after {NUM_WARMUP} rounds that do not count; times are medians of "
            f"{options.repeats}, ratios are taken repeat by repeat. FLOPs are those of the dense "
            "matrix products of a step, as torch counts them; products with sparse features, sums "
            "over edges and the optimizer are not among them. A layer of sage that narrows "
            "multiplies before it sums over edges, one that widens does so afterwards, and a "
            "sub-model may thus need fewer than 1/m² of them. Wanted is at least "
            f"{WANTED:g} of the gain that fewer FLOPs promise."
        )
    return words, tables


def _table_alone(options: WidthsBench, rows: Sequence[Row]) -> Table:
    seconds: dict[tuple[str, int], list[float]] = {}
    flops: dict[int, int] = {}
    for row in rows:
        if row.flops is not None and row.seconds is not None:
            seconds.setdefault((row.what, row.replicas), []).append(row.seconds)
            flops[row.replicas] = row.flops
    cells: list[list[str]] = []
    for m, number in flops.items():
        promised = flops[1] / number
        cell = [str(m), f"{options.alone_width // m:,}"]
        cell += [f"{number / 1e9:,.2f}", f"{promised:,.2f}"]
        for kind in (_WHOLE, _WITHOUT):
            step, of = seconds[kind, m], seconds[kind, 1]
            gain = median(o / s for o, s in zip(of, step, strict=True))
            cell += [f"{1e3 * median(step):,.1f}", f"{gain:,.2f}", f"{gain / promised:.2f}"]
        cells.append(cell)
    headers = ["m", "width", "GFLOPs", "times fewer", "ms a step", "times as fast", "of promised"]
    headers += ["ms without optimizer", "times as fast", "of promised"]
    return Table(f"One sub-model of width {options.alone_width:,} / m alone", headers, cells)


QUESTION = Question(
    title="Sub-networks by the width of their model",
    not_shared=(*_OF_RUNS, *_OWN),
    plan=_plan,
    read=_read,
    told=lambda row: ", ".join(filter(None, _cells(row))),
    page=_page,
    failed=_failed,
    more=_alone,
)
