"""Gather the timing of a run from all ranks, write it to its folder, and describe it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from vigpipe.analysis.account import PARTS, Account, make_accounts
from vigpipe.analysis.bubble import Bubble, explain_bubble, mean_times, predicted_spans
from vigpipe.files.atomic import write_atomically
from vigpipe.job.rows import members
from vigpipe.launch.device import peak_bytes
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.values import gather_values
from vigpipe.run.facts import Run
from vigpipe.run.provenance import origin
from vigpipe.run.rank import RankState
from vigpipe.spans import Span
from vigpipe.timing.clock import ClockReading, clock_error, make_clock, on_rank_0, read_clocks
from vigpipe.timing.cost import stamp_seconds
from vigpipe.timing.partial import partial_batches, partial_sentence
from vigpipe.timing.recorder import PHASES, Event, Phase, RecordedStep, Recorder, Row
from vigpipe.timing.tables import statistics, step_statistics, study_table, tables, write_rows
from vigpipe.timing.timeline import draw_timeline
from vigpipe.timing.trace import write_trace


@dataclass(frozen=True)
class Timing:
    """The recorded timing of all ranks of a run."""

    layout: Layout
    num_warmup: int  # steps that were left out before the first recorded one
    rows: list[Row]
    # By phase and rank, all on the clock of rank 0; with full batches, or all if none has one.
    steps: dict[Phase, dict[int, list[RecordedStep]]]
    clock_error_seconds: float
    overhead: float  # share of a step that timing itself costs, of the rank that it costs most
    peak_bytes: list[int]  # of every rank
    members: str = "samples"  # what batches are made of, `vigpipe.job.rows.members`

    @cached_property
    def accounts(self) -> list[Account]:
        return make_accounts(self.rows, self.layout)

    @cached_property
    def bubble(self) -> Bubble | None:
        """Why ranks wait; cached, because every step is simulated for it."""
        return explain_bubble(self.accounts, self.steps["train"], self.layout)

    def summary(self) -> dict[str, Any]:
        """Return the entry "timing" of summary.json."""
        train = step_statistics(self.rows, "train")
        return {
            "warmup_steps": self.num_warmup,
            "step_seconds": None if train is None else asdict(train),
            "partial_batches": [
                {
                    "phase": batch.phase,
                    "samples": batch.samples,
                    "full_batch": batch.full_batch,
                    "step_seconds": asdict(statistics(batch.seconds)),
                }
                for batch in partial_batches(self.rows)
            ],
            "overhead": self.overhead,
            "clock_error_seconds": self.clock_error_seconds,
            "accounting": [account.as_table() for account in self.accounts],
            "bubble": None if self.bubble is None else asdict(self.bubble),
            "peak_bytes": self.peak_bytes,
        }


def make_recorder(run: Run, rank: int, device: torch.device) -> Recorder | None:
    """Make the recorder of a rank; None if the run is not timed."""
    config = run.config
    if not (config.timing or config.trace):
        return None
    replica = run.layout.replica_index(rank)
    return Recorder(make_clock(device), rank, replica, config.timing_warmup, config.timing_steps)


def gather_timing(rank_state: RankState, first_clocks: Sequence[ClockReading]) -> Timing | None:
    """Gather what all ranks, which all call this, have recorded; None where no files are written.

    The first clocks are those that `read_clocks` returned before the first recorded step.
    """
    recorder = rank_state.recorder
    assert recorder is not None
    last_clocks = read_clocks()
    own_clocks = first_clocks[recorder.rank], last_clocks[recorder.rank]
    own = [
        [list(astuple(row)) for row in recorder.take_rows()],
        {
            # Those with full batches, or all if none has one; all ranks choose the same ones.
            phase: [
                _as_list(_on_rank_0(s, *own_clocks)) for s in [s for s in kept if s.is_full] or kept
            ]
            for phase, kept in recorder.steps.items()
        },
        recorder.num_stamps * stamp_seconds(recorder.clock, rank_state.device),
        peak_bytes(rank_state.device),
    ]
    layout = rank_state.run.layout
    by_rank = gather_values(own, layout.world_size, layout.pipeline_size - 1)
    if by_rank is None or not rank_state.is_writer:
        return None
    rows_by_rank, steps, costs, peaks = zip(*by_rank, strict=True)
    all_rows = [Row(*row) for rows in rows_by_rank for row in rows]
    train = step_statistics(all_rows, "train")
    return Timing(
        layout=layout,
        num_warmup=recorder.num_warmup,
        rows=all_rows,
        steps={
            phase: {rank: [*map(_as_step, of_rank[phase])] for rank, of_rank in enumerate(steps)}
            for phase in PHASES
        },
        clock_error_seconds=clock_error(first_clocks, last_clocks),
        overhead=0.0 if train is None else max(costs) / train.median,
        peak_bytes=list(peaks),
        members=members(rank_state.run.job.unit),
    )


def _on_rank_0(step: RecordedStep, first: ClockReading, last: ClockReading) -> RecordedStep:
    def at(seconds: float) -> float:
        return on_rank_0(seconds, first, last)

    return step._replace(
        spans=[s._replace(start=at(s.start), end=at(s.end)) for s in step.spans],
        events=[e._replace(start=at(e.start), end=at(e.end)) for e in step.events],
    )


def _as_list(step: RecordedStep) -> list[Any]:
    """Return a step as other ranks can be told it, for `_as_step`."""
    phase, number, spans, events, is_full = step
    return [phase, number, [list(s) for s in spans], [list(e) for e in events], is_full]


def _as_step(told: Sequence[Any]) -> RecordedStep:
    phase, number, spans, events, is_full = told
    return RecordedStep(
        phase, number, [Span(*s) for s in spans], [Event(*e) for e in events], is_full
    )


def write_timing(timing: Timing, run: Run, folder: Path, device: torch.device) -> None:
    """Write timing.csv, timing.md, timeline.json and, with --trace, the trace and the pictures."""
    write_rows(timing.rows, folder / "timing.csv")
    (folder / "timing.md").write_text(
        f"# Timing of {run.config.model}, {run.layout}\n\n{describe(timing, 'github')}\n\n"
        f"{origin(device)}",
        encoding="utf-8",
    )
    layout, steps = timing.layout, timing.steps["train"]
    last_steps = [of_rank[-1] for of_rank in steps.values() if of_rank]
    measured = [span for step in last_steps for span in step.spans]
    if not measured:
        return
    predicted = predicted_spans(mean_times(steps, layout), layout)
    timeline = {
        "step": last_steps[0].step,
        "microbatches": layout.num_microbatches,
        "clock_error_seconds": timing.clock_error_seconds,
        "measured": _since_begin(measured),
        "predicted": _since_begin(predicted),
    }
    # A report of the run, which has not ended yet, may read it.
    write_atomically(folder / "timeline.json", json.dumps(timeline) + "\n")
    if not run.config.trace:
        return
    traced = {
        rank: [step for phase in PHASES for step in timing.steps[phase][rank] if step.events]
        for rank in steps
    }
    replica_of = {rank: layout.replica_index(rank) for rank in traced}
    write_trace(traced, replica_of, timing.clock_error_seconds, folder / "trace.json")
    timelines = {
        "measured, the last timed step": measured,
        "simulated, with the mean of the measured times and free transfers": predicted,
    }
    draw_timeline(timelines, [folder / "timeline.png", folder / "timeline.svg"])


def _since_begin(spans: Sequence[Span]) -> list[Sequence[object]]:
    begin = min(span.start for span in spans)
    return [
        (s.rank, s.kind, round(s.start - begin, 9), round(s.end - begin, 9), s.stage, s.microbatch)
        for s in spans
    ]


def describe(timing: Timing, fmt: str = "simple") -> str:
    """Describe the timing: the first tables as text (`simple`), or all in Markdown (`github`)."""
    heading = "## " if fmt == "github" else ""
    train = step_statistics(timing.rows, "train")
    partial = partial_batches(timing.rows)
    has_others = any(batch.phase == "train" and not batch.are_counted for batch in partial)
    of_full = " with full batches" if has_others else ""
    if train is None:
        sections = [f"No step was timed: the run ended in the warm-up of {timing.num_warmup}."]
    else:
        sections = [
            f"{train.count} steps{of_full} after a warm-up of {timing.num_warmup}: median "
            f"{1e3 * train.median:.3f} ms, {1e3 * train.min:.3f} to {1e3 * train.max:.3f} ms; a "
            "step lasts as long as its slowest rank. Timing itself costs "
            f"{timing.overhead:.2%} of a step."
        ]
    if partial:
        sections.append(f"{heading}Partial batches")
        sections += [partial_sentence(batch, timing.members) for batch in partial]
    if train is not None:
        sections += [f"{heading}Where a step goes", account_table(timing.accounts, fmt)]
    bubble = timing.bubble
    if bubble is not None:
        sections += [f"{heading}The bubble", bubble_sentence(bubble)]
    sections += [f"{heading}Per phase (format of docs/study.md)", study_table(timing.rows, fmt)]
    if fmt == "github":
        sections.append(tables(timing.rows))
    peaks = [f"rank {rank}: {peak / 1e6:.0f} MB" for rank, peak in enumerate(timing.peak_bytes)]
    sections += [f"{heading}Peak memory", ", ".join(peaks)]
    return "\n\n".join(sections)


def where_the_rest_is(folder: Path, with_pictures: bool) -> str:
    """Say where what `describe` leaves out is to be found."""
    text = f"{folder}/timing.md has the tables of every stage, block and part, timing.csv all rows"
    pictures = "; timeline.png shows the last timed step, trace.json goes into ui.perfetto.dev"
    return f"{text}{pictures if with_pictures else ''}; vigpipe report {folder} makes a page."


def account_table(accounts: Sequence[Account], fmt: str) -> str:
    """Make a table: mean milliseconds by what a rank does, and the share not accounted for."""
    lines = [
        (
            str(account.rank),
            ", ".join(map(str, account.stages)),
            f"{1e3 * account.step_seconds:.2f}",
            *(f"{1e3 * account.seconds[part]:.2f}" for part in PARTS[:-1]),
            f"{account.seconds['unaccounted'] / account.step_seconds:.2%}",
        )
        for account in accounts
    ]
    headers = ["rank", "stage", "step, ms", *PARTS]
    return tabulate(lines, headers=headers, tablefmt=fmt, disable_numparse=True, stralign="right")


def bubble_sentence(bubble: Bubble) -> str:
    """Write the measured bubble, the formula's, and the reasons of the difference as text."""
    reasons: Mapping[str, float] = {
        "filling and draining": bubble.fill_and_drain,
        "unequal stages": bubble.imbalance,
        "unequal micro-batches": bubble.variation,
        "transfers and what the schedule itself does": bubble.transfer,
    }
    shares = "; ".join(f"{name} {share:+.1%}" for name, share in reasons.items())
    return (
        f"Ranks wait {bubble.measured:.1%} of a step; (S - 1) / (V M + S - 1) gives "
        f"{bubble.formula:.1%} of the schedule. Of a step: {shares}."
    )
