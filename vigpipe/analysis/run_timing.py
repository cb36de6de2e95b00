"""The timing of a run: gathered from all ranks, written to its folder, told to the user."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from vigpipe.analysis.account import PARTS, Account, account
from vigpipe.analysis.bubble import Bubble, explain_bubble, mean_times, predicted_spans
from vigpipe.launch.device import peak_bytes
from vigpipe.parallel.layout import Layout
from vigpipe.run.facts import Run
from vigpipe.run.provenance import origin
from vigpipe.run.rank import RankState
from vigpipe.spans import Span
from vigpipe.timing.clock import ClockReading, clock_error, make_clock, on_rank_0, read_clocks
from vigpipe.timing.cost import stamp_seconds
from vigpipe.timing.recorder import PHASES, Phase, Recorder, Row, Step
from vigpipe.timing.tables import step_statistics, study_table, tables, write_rows
from vigpipe.timing.timeline import draw_timeline
from vigpipe.timing.trace import write_trace


@dataclass(frozen=True)
class Timing:
    """What the ranks of a run have recorded.

    Attributes:
        layout: the degrees.
        num_warmup: steps that were left out before the first one recorded.
        rows: of all ranks.
        steps: recorded closely, by phase and rank, all on the clock of rank 0.
        clock_error_seconds: how far the times of one event on two ranks may be apart; see
            `vigpipe.timing.clock.clock_error`.
        overhead: share of a step that timing itself costs the rank it costs most.
        peak_bytes: most memory of every rank.
    """

    layout: Layout
    num_warmup: int
    rows: list[Row]
    steps: dict[Phase, dict[int, list[Step]]]
    clock_error_seconds: float
    overhead: float
    peak_bytes: list[int]

    @cached_property
    def accounts(self) -> list[Account]:
        """Where every rank's time goes."""
        return account(self.rows, self.layout)

    @cached_property
    def bubble(self) -> Bubble | None:
        """Why ranks wait; every step is simulated for it, so only once."""
        return explain_bubble(self.accounts, self.steps["train"], self.layout)

    @property
    def measured_spans(self) -> list[Span]:
        """The last training step, of all ranks."""
        last = [own[-1].spans for own in self.steps["train"].values() if own]
        return [span for spans in last for span in spans]

    @property
    def predicted_spans(self) -> list[Span]:
        """The schedule with the mean of the measured times, without transfers; of one replica."""
        return predicted_spans(mean_times(self.steps["train"], self.layout), self.layout)

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        train = step_statistics(self.rows, "train")
        return {
            "warmup_steps": self.num_warmup,
            "step_seconds": None if train is None else asdict(train),
            "overhead": self.overhead,
            "clock_error_seconds": self.clock_error_seconds,
            "accounting": [own.as_table() for own in self.accounts],
            "bubble": None if self.bubble is None else asdict(self.bubble),
            "peak_bytes": self.peak_bytes,
        }


def make_recorder(run: Run, rank: int, device: torch.device) -> Recorder | None:
    """The recorder of a rank, if the run is timed."""
    config = run.config
    if not (config.timing or config.trace):
        return None
    return Recorder(
        make_clock(device),
        rank,
        run.layout.replica_index(rank),
        config.timing_warmup,
        config.timing_steps,
    )


def gather_timing(rank_state: RankState, first_clocks: Sequence[ClockReading]) -> Timing | None:
    """Bring together what all ranks have recorded; all of them call this.

    Args:
        rank_state: of this rank, with a recorder.
        first_clocks: what `read_clocks` returned before the first recorded step. The clocks are
            read a second time here.

    Returns:
        It, on the rank that writes the run's files; else None.
    """
    recorder = rank_state.recorder
    assert recorder is not None
    last_clocks = read_clocks()
    own_clocks = first_clocks[recorder.rank], last_clocks[recorder.rank]
    rows = recorder.take_rows()
    own = (
        rows,
        {
            phase: [_on_rank_0(step, *own_clocks) for step in kept]
            for phase, kept in recorder.steps.items()
        },
        recorder.num_stamps * stamp_seconds(recorder.clock, rank_state.device),
        peak_bytes(rank_state.device),
    )
    by_rank = _gathered(own, rank_state)
    if by_rank is None:
        return None
    all_rows = [row for rows, *_ in by_rank for row in rows]
    train = step_statistics(all_rows, "train")
    return Timing(
        layout=rank_state.run.layout,
        num_warmup=recorder.num_warmup,
        rows=all_rows,
        steps={
            phase: {rank: steps[phase] for rank, (_, steps, *_) in enumerate(by_rank)}
            for phase in ("train", "test")
        },
        clock_error_seconds=clock_error(first_clocks, last_clocks),
        overhead=0.0 if train is None else max(cost for *_, cost, _ in by_rank) / train.median,
        peak_bytes=[peak for *_, peak in by_rank],
    )


def _on_rank_0(step: Step, first: ClockReading, last: ClockReading) -> Step:
    def at(seconds: float) -> float:
        return on_rank_0(seconds, first, last)

    return step._replace(
        spans=[s._replace(start=at(s.start), end=at(s.end)) for s in step.spans],
        events=[e._replace(start=at(e.start), end=at(e.end)) for e in step.events],
    )


def _gathered(own: Any, rank_state: RankState) -> list[Any] | None:  # noqa: ANN401
    layout = rank_state.run.layout
    if layout.world_size == 1:
        return [own]
    by_rank = [None] * layout.world_size if rank_state.is_writer else None
    dist.gather_object(own, by_rank, dst=layout.pipeline_size - 1)
    return by_rank


def write_timing(timing: Timing, run: Run, folder: Path, device: torch.device) -> None:
    """Write timing.csv, timing.md, timeline.json and, if asked for, the trace and the pictures."""
    write_rows(timing.rows, folder / "timing.csv")
    (folder / "timing.md").write_text(
        f"# Timing of {run.config.model}, {run.layout}\n\n{describe(timing, 'github')}\n\n"
        f"{origin(device)}",
        encoding="utf-8",
    )
    measured = timing.measured_spans
    if not measured:
        return
    predicted = timing.predicted_spans
    (folder / "timeline.json").write_text(
        json.dumps(
            {
                "step": next(own[-1].step for own in timing.steps["train"].values()),
                "microbatches": timing.layout.num_microbatches,
                "clock_error_seconds": timing.clock_error_seconds,
                "measured": _since_begin(measured),
                "predicted": _since_begin(predicted),
            }
        )
        + "\n",
        encoding="utf-8",
    )
    if not run.config.trace:
        return
    every = {
        rank: [step for phase in PHASES for step in timing.steps[phase][rank] if step.events]
        for rank in timing.steps["train"]
    }
    layout = timing.layout
    replica_of = {rank: layout.replica_index(rank) for rank in every}
    write_trace(every, replica_of, timing.clock_error_seconds, folder / "trace.json")
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
    """All of it for people to read: text, or Markdown with `github`."""
    heading = "## " if fmt == "github" else ""
    train = step_statistics(timing.rows, "train")
    parts: list[str] = []
    if train is None:
        parts.append(f"No step was timed: the run ended in the warm-up of {timing.num_warmup}.")
    else:
        parts.append(
            f"{train.count} steps after a warm-up of {timing.num_warmup}: median "
            f"{1e3 * train.median:.3f} ms, {1e3 * train.min:.3f} to {1e3 * train.max:.3f} ms; a "
            "step lasts as long as its slowest rank. Timing itself costs "
            f"{timing.overhead:.2%} of a step."
        )
        parts += [f"{heading}Where a step goes", account_table(timing.accounts, fmt)]
    bubble = timing.bubble
    if bubble is not None:
        parts += [f"{heading}The bubble", bubble_sentence(bubble)]
    parts += [
        f"{heading}As in the study's tables",
        study_table(timing.rows, fmt),
        tables(timing.rows, fmt),
        f"{heading}Peak memory",
        ", ".join(
            f"rank {rank}: {peak / 1e6:.0f} MB" for rank, peak in enumerate(timing.peak_bytes)
        ),
    ]
    return "\n\n".join(parts)


def account_table(accounts: Sequence[Account], fmt: str = "simple") -> str:
    """Milliseconds of a step by what a rank does, mean over the steps; and the share missed."""
    lines = [
        (
            str(own.rank),
            ", ".join(map(str, own.stages)),
            *(
                f"{1e3 * x:.2f}"
                for x in (own.step_seconds, *(own.seconds[part] for part in PARTS[:-1]))
            ),
            f"{own.seconds['unaccounted'] / own.step_seconds:.2%}",
        )
        for own in accounts
    ]
    headers = ["rank", "stage", "step, ms", *PARTS]
    return tabulate(lines, headers=headers, tablefmt=fmt, disable_numparse=True, stralign="right")


def bubble_sentence(bubble: Bubble) -> str:
    """The measured bubble beside the formula's, and what makes the difference."""
    reasons: Mapping[str, float] = {
        "filling and draining": bubble.fill_and_drain,
        "unequal stages": bubble.imbalance,
        "unequal micro-batches": bubble.variation,
        "transfers and what the schedule itself does": bubble.transfer,
    }
    told = "; ".join(f"{name} {share:+.1%}" for name, share in reasons.items())
    return (
        f"Ranks wait {bubble.measured:.1%} of a step; (S - 1) / (V M + S - 1) gives "
        f"{bubble.formula:.1%} of the schedule. Of a step: {told}."
    )
