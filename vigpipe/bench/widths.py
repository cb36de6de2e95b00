"""How much memory and time do sub-networks take, by the width of the model that they make up?

A few steps of `vigpipe train` for each width and number of sub-networks; what vigpipe refuses, and
what fails, is a row of the table. Besides, the steps of one sub-model alone, in this process.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from vigpipe.bench.narrow import Narrow, time_narrow
from vigpipe.bench.options import WidthsBench
from vigpipe.bench.side_by_side import NUM_WARMUP
from vigpipe.bench.trained import (
    FILES,
    PEAK,
    Failure,
    Table,
    all_of,
    check_graph_model,
    check_left_out,
    largest_peak,
    parse_numbers,
    slowest_step,
    try_to_train,
    write_page,
    write_shared,
)
from vigpipe.errors import WRONG_INPUT, InputError
from vigpipe.run.folder import METRICS, WEIGHTS, make_output_folder
from vigpipe.run.follow import parse_rows

WANTED = 0.8  # of what fewer FLOPs promise
_OF_RUNS = ("width", "dp", "strategy", "evaluate_every")
_OWN = ("average_every", "widths", "replicas", "alone_width", "repeats")


class Row(NamedTuple):
    """A row of rows.csv: of a run, or of a step of a sub-model alone.

    Attributes:
        what: a run, or a kind of step of a sub-model alone.
        width: of the wide model.
        replicas: m.
        repeat: number of a step of a sub-model alone.
        seconds: of a step; of a run the median of the slowest replica's, with their data. None if
            it has failed.
        peak_bytes: largest memory of a rank; None if the run has failed, and of a sub-model alone.
        flops: of a step of a sub-model alone.
        exit_code: of a run.
        sentence: with which it has failed.
    """

    what: str
    width: int
    replicas: int
    repeat: int | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    flops: int | None = None
    exit_code: int | None = None
    sentence: str = ""


def bench_widths(options: WidthsBench) -> None:
    """Train a few steps of every width, time sub-models alone, and write README.md and rows.csv.

    Raises:
        InputError: an option is out of range, or all runs have failed.
    """
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
    folder = make_output_folder(options.out, FILES)
    write_shared(folder, options, (*_OF_RUNS, *_OWN))
    # Before the models in this process: Linux takes the peak of the parent for that of a child.
    cases = [(width, m) for width in widths for m in replicas]
    runs = all_of(partial(_run, folder, options, *case) for case in cases)
    if all(run.exit_code for run in runs):
        raise InputError(f"every run has failed, the first one with: {runs[0].sentence}")
    alone: list[Narrow] = []
    if options.alone_width:
        alone = time_narrow(options, sorted({1, *replicas}))
    _write(folder, options, runs, alone)


def _run(folder: Path, options: WidthsBench, width: int, replicas: int) -> Row:
    # Evaluated once, at the end.
    chosen: dict[str, object] = {"width": width, "evaluate_every": options.steps}
    if replicas > 1:
        chosen |= {"strategy": "subnetworks", "dp": replicas}
        chosen["average_every"] = options.average_every
    out = folder / "runs" / f"{width}-{replicas}"
    found = try_to_train(folder, out, chosen)
    if isinstance(found, Failure):
        row = Row("run", width, replicas, exit_code=found.code, sentence=found.sentence)
    else:
        seconds = slowest_step(parse_rows((out / METRICS).read_bytes()))
        peak = largest_peak(found)
        row = Row("run", width, replicas, seconds=seconds, peak_bytes=peak, exit_code=0)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)  # of wide models they fill a disk
    (out / WEIGHTS).unlink(missing_ok=True)
    print(f"width {width}, m = {replicas}: {', '.join(filter(None, _cells(row)))}", flush=True)
    return row


def _cells(row: Row) -> tuple[str, str, str]:
    """Return memory, seconds and what went wrong."""
    if row.seconds is None or row.peak_bytes is None:
        why = "refused" if row.exit_code == WRONG_INPUT else f"exit code {row.exit_code}"
        return "–", "–", f"{why}: {row.sentence}"
    return f"{row.peak_bytes / 2**20:,.0f} MiB", f"{row.seconds:.3f}", ""


def _write(
    folder: Path, options: WidthsBench, runs: Sequence[Row], alone: Sequence[Narrow]
) -> None:
    headers = ["width", "m", "peak memory a rank", "s a step", ""]
    cells = [(f"{row.width:,}", str(row.replicas), *_cells(row)) for row in runs]
    tables = [Table("Runs", headers, cells)]
    rows = list(runs)
    if alone:
        tables.append(_table_alone(options, alone))
    for narrow in alone:
        for step, kind in ((narrow.whole, "step alone"), (narrow.without, "without optimizer")):
            rows += [
                Row(kind, options.alone_width, narrow.m, i, seconds, flops=narrow.flops)
                for i, seconds in enumerate(step)
            ]
    question = (
        f"{options.model}, {options.layers} layers, on {options.data}: {options.steps} steps, in "
        f"rounds of {options.average_every}, and one evaluation. m = 1 is a model that is trained "
        "as a whole; otherwise each of m ranks on this host trains an m-th of the channels. "
        f"Seconds are the median of the slowest rank's steps, with their data. {PEAK} What vigpipe "
        "refuses has a row with its sentence."
    )
    if alone:
        question += (
            f" Below, one sub-model by itself, in one process with one thread: steps of all m take "
            f"turns, after {NUM_WARMUP} rounds that do not count; times are medians of "
            f"{options.repeats}, ratios are taken repeat by repeat. FLOPs are those of the dense "
            "matrix products of a step, as torch counts them; products with sparse features, sums "
            "over edges and the optimizer are not among them. A layer of sage that narrows "
            "multiplies before it sums over edges, one that widens does so afterwards, and a "
            "sub-model may thus need fewer than 1/m² of them. Wanted is at least "
            f"{WANTED:g} of the gain that fewer FLOPs promise."
        )
    write_page(folder, "Sub-networks by the width of their model", question, tables, rows)


def _table_alone(options: WidthsBench, alone: Sequence[Narrow]) -> Table:
    base = alone[0]
    rows: list[list[str]] = []
    for narrow in alone:
        promised = base.flops / narrow.flops
        row = [str(narrow.m), f"{options.alone_width // narrow.m:,}"]
        row += [f"{narrow.flops / 1e9:,.2f}", f"{promised:,.2f}"]
        for step, of in ((narrow.whole, base.whole), (narrow.without, base.without)):
            gain = median(o / s for o, s in zip(of, step, strict=True))
            row += [f"{1e3 * median(step):,.1f}", f"{gain:,.2f}", f"{gain / promised:.2f}"]
        rows.append(row)
    headers = ["m", "width", "GFLOPs", "times fewer", "ms a step", "times as fast", "of promised"]
    headers += ["ms without optimizer", "times as fast", "of promised"]
    return Table(f"One sub-model of width {options.alone_width:,} / m alone", headers, rows)
