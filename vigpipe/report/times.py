"""Make the sections about where the time of a timed run goes: bubble, timeline, durations."""

from collections.abc import Iterator
from dataclasses import asdict

from vigpipe.analysis.account import PARTS
from vigpipe.job.rows import members
from vigpipe.messages import plural
from vigpipe.report import charts, durations
from vigpipe.report.charts import as_html
from vigpipe.report.markup import (
    folded,
    milliseconds,
    paragraph,
    share,
    size,
    statistics_table,
    table,
)
from vigpipe.report.read import ReportedRun
from vigpipe.report.terms import explain
from vigpipe.report.timing_files import PHASES, ReportedTiming
from vigpipe.spans import COMPUTE
from vigpipe.timing.boxes import explanation, places_of_stages
from vigpipe.timing.partial import partial_batches, partial_sentence
from vigpipe.timing.tables import slowest

PHASE_NAMES = {"train": "Training steps", "test": "Test batches"}
_OF_BLOCKS = ("stem", "block", "Grapher", "kNN", "aggregation", "FFN", "readout")
_OF_LAYERS = ("block of a graph model", "aggregation", "update")


def has_times(run: ReportedRun) -> bool:
    """Return whether the run has anything that `time_sections` shows."""
    timing = run.timing
    return timing is not None and bool(timing.rows or timing.accounts or _has_timeline(timing))


def time_sections(timing: ReportedTiming, index: int, unit: str = "images") -> Iterator[str]:
    """Make the HTML about the time of the run at this position of the page."""
    sections = {
        "bubble accounting": timing.accounts,
        "timeline": _has_timeline(timing),
        "table of stages, blocks and readout": timing.rows,
    }
    missing = [name for name, content in sections.items() if not content]
    if missing:
        yield paragraph(
            f"This run has no {', no '.join(missing)}; a run of vigpipe train --timing that "
            "comes to its end has.",
            "note",
        )
    yield from _partial_batches(timing, unit)
    yield from _bubble(timing, index)
    yield from _timeline(timing, index)
    yield from _durations(timing, index)


def _has_timeline(timing: ReportedTiming) -> bool:
    return timing.timeline is not None and bool(timing.timeline.measured)


def _partial_batches(timing: ReportedTiming, unit: str) -> Iterator[str]:
    batches = partial_batches(timing.rows)
    if batches:
        yield "<h3>Partial batches</h3>"
    for batch in batches:
        yield paragraph(partial_sentence(batch, members(unit)))


def _bubble(timing: ReportedTiming, index: int) -> Iterator[str]:
    if timing.bubble is None and not timing.accounts:
        return
    yield "<h3>Bubble</h3>"
    if timing.bubble is not None:
        yield paragraph(
            f"The bubble is {share(timing.bubble.measured)} of the step; the formula for equal "
            f"stages says {share(timing.bubble.formula)}."
        )
        shares: dict[str, float] = asdict(timing.bubble)
        names = [name.replace("_", " ") for name in shares]
        yield table(["share of the step", *names], [["bubble", *map(share, shares.values())]])
        yield explain("bubble", *names)
    elif len(timing.accounts) == 1:
        yield paragraph("A run of one stage has no bubble.")
    if timing.accounts:
        yield as_html(charts.account_chart(timing.accounts), f"account-{index}")
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


def _timeline(timing: ReportedTiming, index: int) -> Iterator[str]:
    timeline = timing.timeline
    if timeline is None or not timeline.measured:
        return
    yield "<h3>Timeline</h3>"
    places = places_of_stages([*timeline.measured, *timeline.predicted])
    caption = (
        f"Step {timeline.step}, {plural(timeline.microbatches, 'micro-batch')}. "
        f"{explanation(places)} The ranks' clocks agree within "
        f"{milliseconds(timeline.clock_error_seconds)} ms if their rates are constant."
    )
    if not timeline.predicted:
        caption += " There is no prediction of this run."
    yield paragraph(caption)
    yield explain("forward", "backward", *([] if timing.accounts else PARTS[1:-1]))
    yield as_html(charts.timeline_chart(timeline), f"timeline-{index}")


def _durations(timing: ReportedTiming, index: int) -> Iterator[str]:
    warmup = f" after {timing.warmup_steps} of warm-up" if timing.warmup_steps is not None else ""
    phases = {phase: seconds for phase in PHASES if (seconds := slowest(timing.rows, phase))}
    counts_partial = {b.phase: b.are_counted for b in partial_batches(timing.rows)}
    for number, (phase, seconds) in enumerate(phases.items()):
        yield f"<h3>{PHASE_NAMES[phase]}</h3>"
        caption = (
            f"Milliseconds a step{warmup}, all its micro-batches together, on the rank that took "
            "longest."
        )
        if phase in counts_partial:
            caption += (
                " All are partial batches." if counts_partial[phase] else " Full batches only."
            )
        yield paragraph(caption)
        stacked = {d: s for d in COMPUTE if (s := durations.stacked_medians(seconds, d))}
        if stacked:
            yield as_html(charts.piece_chart(stacked), f"pieces-{phase}-{index}")
        yield "<h4>Steps and stages</h4>"
        yield statistics_table(durations.stage_rows(seconds))
        if number == 0:
            yield explain("between steps", "std", "p95", "count")
        if stacked:
            yield "<h4>Stem, blocks, readout</h4>"
            yield statistics_table(durations.part_rows(seconds))
            if number == 0:
                yield explain(*(_OF_LAYERS if durations.has_layers(seconds) else _OF_BLOCKS))
        blocks = durations.block_rows(seconds)
        if blocks:
            yield folded("Block by block", statistics_table(blocks))
