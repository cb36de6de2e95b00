"""Make one HTML page from runs, which opens from disk and needs no network."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import vigpipe
from vigpipe.analysis.account import PARTS
from vigpipe.analysis.bubble import Bubble
from vigpipe.errors import InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import check_new_file
from vigpipe.report import charts, curves, durations
from vigpipe.report.comparison import (
    Line,
    bubble_line,
    differences,
    progress,
    ratios,
    run_table,
)
from vigpipe.report.markup import (
    escape,
    folded,
    milliseconds,
    paragraph,
    share,
    size,
    statistics_table,
    table,
)
from vigpipe.report.read import ReportedRun, read_runs
from vigpipe.report.style import HEAD
from vigpipe.report.terms import explain
from vigpipe.report.timing_files import PHASES, ReportedTiming
from vigpipe.timing.boxes import explanation, places_of_stages
from vigpipe.timing.tables import slowest

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PHASE_NAMES = {"train": "Training steps", "test": "Test batches"}
DIRECTIONS = ("forward", "backward")
MARK = '<meta name="generator" content="vigpipe report">'
BUTTONS = ("zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage")
_HOW_TO_ZOOM = (
    "Drag over a chart to zoom, double-click to come back; a name in the legend hides it."
)


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the page about one or several runs.

    Args:
        runs: folders that vigpipe train wrote, at least one; the others are compared with the
            first.
        out: the HTML file to write, or to replace if it is such a page.

    Raises:
        InputError: a folder holds no run or a broken file, or the page cannot be written.
    """
    check_new_file(out, "--out ", (".html", ".htm"), mark=MARK, overwrite=None)
    text = page(read_runs(runs))
    try:
        write_atomically(out, text)
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot be written ({error.strerror}); choose another file"
        ) from error


def page(runs: Sequence[ReportedRun]) -> str:
    """Make the HTML of the page about these runs."""
    from plotly.offline import get_plotlyjs

    names = ", ".join(run.name for run in runs)
    title = f"vigpipe report: {names if len(runs) <= 3 else f'{len(runs)} runs'}"
    body = "\n".join([*_overview(runs), *_courses(runs), *_timings(runs)])
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{MARK}\n<title>{escape(title)}</title>\n'
        f"{HEAD}\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n<footer>vigpipe {escape(vigpipe.__version__)}. {_HOW_TO_ZOOM}</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _overview(runs: Sequence[ReportedRun]) -> Iterator[str]:
    yield "<h2>Runs</h2>"
    for run in runs:
        if run.running:
            yield paragraph(f"{run.name} is still running: {progress(run)}.", "running")
        if run.unfinished:
            yield paragraph(f"{run.name} has not finished: {run.unfinished}.", "warning")
    yield _by_run(runs, run_table(runs))
    yield explain("rank", "stage", "replica", "micro-batch", "schedule", "top-1")
    yield paragraph(
        "Medians are over the steps after the warm-up of a timed run, and over all but the first "
        "of another one.",
        "note",
    )
    yield from _without_times(runs)
    if len(runs) > 1:
        yield "<h2>Comparison</h2>"
        medians = ratios(runs)
        if medians:
            yield paragraph(f"Medians of training, and their ratio to those of {runs[0].name}.")
            yield _by_run(runs, medians)
        differ = differences(runs)
        yield "<h3>Options that differ</h3>" if differ else paragraph("All options are the same.")
        if differ:
            yield _by_run(runs, differ)


def _without_times(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Say in one sentence for all of them which runs have no section about their time."""
    without = [run for run in runs if not _has_times(run)]
    later = [run.name for run in without if run.running and run.options.get("timing")]
    never = [run.name for run in without if run.name not in later]
    what = "no bubble, no timeline and no tables of stages and blocks"
    if later:
        yield paragraph(f"There is {what} of {', '.join(later)} until the run ends.", "note")
    if never:
        why = "was not timed" if len(never) == 1 else "were not timed"
        yield paragraph(
            f"{', '.join(never)} {why}: there is {what}, which vigpipe train --timing records.",
            "note",
        )


def _has_times(run: ReportedRun) -> bool:
    timing = run.timing
    return timing is not None and bool(timing.rows or timing.accounts or _has_timeline(timing))


def _has_timeline(timing: ReportedTiming) -> bool:
    return timing.timeline is not None and bool(timing.timeline.measured)


def _by_run(runs: Sequence[ReportedRun], lines: Sequence[Line]) -> str:
    rows = [[name, *cells] for name, cells in lines]
    return table(["", *(run.name for run in runs)], rows, style="runs")


def _courses(runs: Sequence[ReportedRun]) -> Iterator[str]:
    if any(run.steps for run in runs):
        yield "<h2>Loss</h2>"
        yield paragraph(
            "Solid: of every training batch, where a smaller last batch of an epoch is joined with "
            "the one before it; dashed: the mean of an epoch's training images; dotted: of the "
            "test images."
        )
        yield explain("step", "epoch")
        yield _chart(curves.loss_chart(runs), "loss")
    if any(run.evaluations for run in runs):
        yield "<h2>Accuracy</h2>"
        has_average = any(row.ema_top1 is not None for run in runs for row in run.evaluations)
        average = "; dashed: top-1 of the weights' moving average" if has_average else ""
        yield paragraph(f"Solid: top-1 of the test images; dotted: top-5{average}.")
        yield explain("top-1", "top-5", *(["moving average"] if has_average else []))
        yield _chart(curves.accuracy_chart(runs), "accuracy")
    if any(run.steps for run in runs):
        yield "<h2>Learning rate</h2>"
        yield _chart(curves.learning_rate_chart(runs), "learning-rate")
        yield "<h2>Throughput</h2>"
        yield paragraph(
            "Images a second; evaluations are not counted, and smaller last batches left out."
        )
        yield _chart(curves.throughput_chart(runs), "throughput")


def _timings(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for index, run in enumerate(runs):
        if run.timing is None or not _has_times(run):
            continue
        yield f"<h2>Time of {escape(run.name)}</h2>"
        missing = _missing(run.timing)
        if missing:
            yield paragraph(
                f"This run has no {', no '.join(missing)}; a run of vigpipe train --timing that "
                "comes to its end has.",
                "note",
            )
        yield from _bubble(run.timing, index)
        yield from _timeline(run.timing, index)
        yield from _durations(run.timing, index)


def _missing(timing: ReportedTiming) -> list[str]:
    sections = {
        "bubble accounting": timing.accounts,
        "timeline": _has_timeline(timing),
        "table of stages, blocks and readout": timing.rows,
    }
    return [name for name, content in sections.items() if not content]


def _bubble(timing: ReportedTiming, index: int) -> Iterator[str]:
    if timing.bubble is None and not timing.accounts:
        return
    yield "<h3>Bubble</h3>"
    if timing.bubble is not None:
        yield paragraph(bubble_line(timing.bubble))
        yield _shares(timing.bubble)
        yield explain("bubble", *_names_of_shares())
    elif len(timing.accounts) == 1:
        yield paragraph("A run of one stage has no bubble.")
    if timing.accounts:
        yield _chart(charts.account_chart(timing.accounts), f"account-{index}")
        peaks = timing.peak_bytes
        rows = [
            [
                f"rank {account.rank}",
                str(account.replica),
                ", ".join(map(str, account.stages)),
                milliseconds(account.step_seconds),
                *(milliseconds(account.seconds[part]) for part in PARTS),
                size(peaks[account.rank]) if account.rank < len(peaks) else "",
            ]
            for account in timing.accounts
        ]
        head = ["ms a step, mean", "replica", "stages", "step", *PARTS, "peak memory"]
        yield table(head, rows)
        yield explain(*PARTS)
    if timing.overhead is not None:
        yield paragraph(f"Timing itself costs {timing.overhead:.2%} of a step.", "note")


def _shares(bubble: Bubble) -> str:
    shares: dict[str, float] = asdict(bubble)
    head = ["share of the step", *_names_of_shares()]
    return table(head, [["bubble", *map(share, shares.values())]])


def _names_of_shares() -> list[str]:
    return [field.name.replace("_", " ") for field in fields(Bubble)]


def _timeline(timing: ReportedTiming, index: int) -> Iterator[str]:
    timeline = timing.timeline
    if timeline is None or not timeline.measured:
        return
    yield "<h3>Timeline</h3>"
    places = places_of_stages([*timeline.measured, *timeline.predicted])
    caption = (
        f"Step {timeline.step}, {timeline.microbatches} micro-batches. {explanation(places)} The "
        f"ranks' clocks agree within {milliseconds(timeline.clock_error_seconds)} ms if their "
        "rates are constant."
    )
    if not timeline.predicted:
        caption += " There is no prediction of this run."
    yield paragraph(caption)
    yield explain("forward", "backward", *([] if timing.accounts else PARTS[1:-1]))
    yield _chart(charts.timeline_chart(timeline), f"timeline-{index}")


def _durations(timing: ReportedTiming, index: int) -> Iterator[str]:
    warmup = f" after {timing.warmup_steps} of warm-up" if timing.warmup_steps is not None else ""
    phases = {phase: slowest(timing.rows, phase) for phase in PHASES}
    phases = {phase: seconds for phase, seconds in phases.items() if seconds}
    for number, (phase, seconds) in enumerate(phases.items()):
        yield f"<h3>{PHASE_NAMES[phase]}</h3>"
        yield paragraph(
            f"Milliseconds a step{warmup}, all its micro-batches together, on the rank that took "
            "longest.",
        )
        stacked = {d: durations.stacked_medians(seconds, d) for d in DIRECTIONS}
        stacked = {direction: parts for direction, parts in stacked.items() if parts}
        if stacked:
            yield _chart(charts.piece_chart(stacked), f"pieces-{phase}-{index}")
        yield "<h4>Steps and stages</h4>"
        yield statistics_table(durations.stage_rows(seconds))
        if number == 0:
            yield explain("between steps", "std", "p95", "count")
        if stacked:
            yield "<h4>Stem, blocks, readout</h4>"
            yield statistics_table(durations.part_rows(seconds))
            if number == 0:
                yield explain("stem", "block", "Grapher", "kNN", "aggregation", "FFN", "readout")
        blocks = durations.block_rows(seconds)
        if blocks:
            yield folded("Block by block", statistics_table(blocks))


def _chart(figure: "Figure", name: str) -> str:
    from plotly.io import to_html

    return to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,  # the page's head has it once
        div_id=f"chart-{name}",
        default_height="auto",
        config={"responsive": True, "displaylogo": False, "modeBarButtons": [list(BUTTONS)]},
    )
