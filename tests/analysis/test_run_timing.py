"""Timing of real ranks: it changes no bit, and accounts for every step; and the files it leaves."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.analysis.test_bubble import recorded, rows_of
from tests.oracle import images_of, shortened, with_images
from tests.world import run_each
from vigpipe.analysis.run_timing import (
    Timing,
    describe,
    gather_timing,
    make_recorder,
    origin,
    write_timing,
)
from vigpipe.config.options import TrainConfig
from vigpipe.parallel.layout import Layout
from vigpipe.run.batches import batches
from vigpipe.run.evaluation import evaluate
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import train_step
from vigpipe.spans import COMPUTE, SpanKind
from vigpipe.timing.boxes import COLOURS
from vigpipe.timing.clock import read_clocks
from vigpipe.timing.recorder import PHASES, Event, RecordedStep, Row

CPU = torch.device("cpu")
BASE = TrainConfig(data="fake", image_size=8, batch_size=8, steps=3, drop_path=0.2, seed=3)
CLIPPED = replace(BASE, microbatches=3, clip=1.0, ema=0.9, mixup=0.2)
TIMED: dict[str, Any] = {"timing": True, "timing_warmup": 1, "timing_steps": 10}


def trained(config: TrainConfig, rank: int, run: Run | None = None) -> RankState:
    """Train every step, and evaluate two batches where it is timed."""
    torch.set_num_threads(1)
    run = run or prepare(config, torch.float32)
    rank_state = make_rank_state(run, rank, CPU, make_recorder(run, rank, CPU))
    for batch in batches(rank_state):
        fill = run.fill(batch.step * run.layout.num_replicas)
        with rank_state.timed("train", rank_state.step + 1, fill):
            train_step(rank_state, batch)
    if config.timing:
        busy = rank_state.busy_seconds
        assert busy > 0
        evaluate(rank_state, ("test",), 2 * run.batch_size)
        # It is for telling who is slow in training.
        assert rank_state.stopwatch.lap().busy_seconds() == busy
    rank_state.feed.close()
    return rank_state


def compared(rank: int, config: TrainConfig) -> tuple[list[str], Timing | None]:
    """Names of this rank's tensors that timing changes, and the timing of all ranks."""
    clocks = read_clocks()
    plain, timed = trained(config, rank), trained(replace(config, **TIMED), rank)
    state = timed.trained.state()
    changed = [
        name for name, value in plain.trained.state().items() if not torch.equal(value, state[name])
    ]
    return changed, gather_timing(timed, clocks)


def checked(config: TrainConfig, answers: list[tuple[list[str], Timing | None]]) -> Timing:
    """Of all ranks of a run: no bit changed, and the writer's timing is whole."""
    assert [changed for changed, _ in answers] == [[]] * len(answers)
    (timing,) = [timing for _, timing in answers if timing is not None]
    for phase in PHASES:
        by_rank, directions = timing.steps[phase], COMPUTE if phase == "train" else COMPUTE[:1]
        assert sorted(by_rank) == list(range(len(answers)))
        for rank, steps in by_rank.items():
            assert [s.step for s in steps] == list(range(2, 2 + len(steps)))
            assert len(steps) == ((config.steps or 0) - 1 if phase == "train" else 1)
            for step in steps:
                assert_whole(step, timing.layout, rank, directions)
    assert_accounted(timing)
    return timing


def assert_whole(
    step: RecordedStep, layout: Layout, rank: int, directions: Sequence[SpanKind]
) -> None:
    """No gap, no overlap; every stage and micro-batch once a direction; regions inside spans."""
    for before, after in pairwise(step.spans):
        assert before.end == pytest.approx(after.start, abs=1e-9)
    assert all(span.end >= span.start for span in step.spans)
    ran = Counter((s.kind, s.stage, s.microbatch) for s in step.spans if s.kind in COMPUTE)
    assert ran == {
        (direction, stage, microbatch): 1
        for direction in directions
        for stage in layout.stages_of(rank)
        for microbatch in range(layout.num_microbatches)
    }
    last = layout.pipeline_size * layout.virtual_stages - 1
    kinds = {(span.kind, span.stage) for span in step.spans}
    assert ("wait input", 0) not in kinds
    assert ("wait gradient", last) not in kinds
    if layout.pipeline_size > 1:
        for stage in layout.stages_of(rank):
            assert ("wait input", stage) in kinds or stage == 0
            if "backward" in directions and layout.virtual_stages == 1:
                assert ("wait gradient", stage) in kinds or stage == last
    if "backward" in directions:
        assert ("optimizer", -1) in kinds
        assert ("all-reduce", -1) in kinds
    else:
        assert not {"optimizer", "all-reduce", "wait gradient"} & {kind for kind, _ in kinds}
    assert step.events
    for event in step.events:
        kind = "forward" if event.direction == "forward" else "backward"
        where = (kind, event.stage, event.microbatch)
        (span,) = [s for s in step.spans if (s.kind, s.stage, s.microbatch) == where]
        assert span.start <= event.start <= event.end <= span.end
        assert event.direction in (*directions, "recompute")


def assert_accounted(timing: Timing) -> None:
    """The spans of a rank's steps are within 2 % of what another clock has measured.

    The processor may be taken away between the readings of the two clocks, but not every time.
    """
    seconds: dict[tuple[Any, ...], list[float]] = {}
    for row in timing.rows:
        if row.name == "step" or row.name in COLOURS:
            own = seconds.setdefault((row.phase, row.step, row.rank), [0.0, 0.0])
            own[row.name == "step"] += row.seconds
    assert seconds
    pairs = [
        *seconds.values(),
        *((a.step_seconds - a.seconds["unaccounted"], a.step_seconds) for a in timing.accounts),
    ]
    missed = [pair for pair in pairs if pair[0] != pytest.approx(pair[1], rel=0.02, abs=2e-3)]
    assert len(missed) < len(pairs) / 2, missed


def region_names(step: RecordedStep, direction: str) -> set[str]:
    return {event.name for event in step.events if event.direction == direction}


# ---- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        replace(CLIPPED, recompute="except-last", graph="window,reuse", aggregator="maxmean"),
        replace(BASE, model="vig_study", drop_path=None, microbatches=2, graph="knn"),
    ],
    ids=["digits", "study"],
)
def test_timing_changes_no_bit_of_one_process(config, monkeypatch):
    # Measured, it is 0 where a busy machine hides it.
    monkeypatch.setattr("vigpipe.analysis.run_timing.stamp_seconds", lambda clock, device: 1e-7)
    timing = checked(config, [compared(0, config)])
    assert timing.bubble is None
    assert timing.clock_error_seconds == 0
    assert 0 < timing.overhead < 1
    (step, *_) = timing.steps["train"][0]
    assert {"stem", "readout", "loss", "block 1/grapher"} <= region_names(step, "forward")
    assert {"readout", "loss", "block 1/ffn"} <= region_names(step, "backward")
    assert ("block 1/grapher" in region_names(step, "recompute")) == (config.recompute != "never")


def timed_with_few_images(rank: int, config: TrainConfig) -> Timing | None:
    clocks, run = read_clocks(), prepare(config, torch.float32)
    run = with_images(run, shortened(images_of(run), 11, 11))
    return gather_timing(trained(config, rank, run), clocks)


def timed_by_drifting_clocks(rank: int, config: TrainConfig) -> Timing | None:
    """Rank 1's clock is 5 s ahead at the start, and gains a second every second."""
    real = time.perf_counter
    begin = real()
    if rank == 1:
        time.perf_counter = lambda: begin + 5 + 2 * (real() - begin)
    try:
        clocks = read_clocks()
        return gather_timing(trained(config, rank), clocks)
    finally:
        time.perf_counter = real


OF_TWO_STAGES = replace(BASE, stages=2, microbatches=3, steps=2)
SCHEDULES: dict[Any, dict[str, Any]] = {  # gpipe is that of the replicas below
    "1f1b": {"recompute": "always", "graph": "knn,lookahead", "aggregator": "sage,gin"},
    "interleaved1f1b": {"virtual_stages": 2, "microbatches": 4},
    "loopedbfs": {"virtual_stages": 2},
}
ON_TWO_RANKS: dict[str, tuple[Callable[[int, TrainConfig], Any], TrainConfig]] = {
    **{
        name: (compared, replace(OF_TWO_STAGES, schedule=name, **options))
        for name, options in SCHEDULES.items()
    },
    # Eleven images in batches of 8: every other step has 3 of them.
    "partial": (
        timed_with_few_images,
        replace(BASE, **(TIMED | {"timing_steps": 2}), dp=2, microbatches=2, steps=7),
    ),
    "drifting": (timed_by_drifting_clocks, replace(OF_TWO_STAGES, **TIMED, steps=6)),
}
REPLICAS = replace(BASE, stages=2, dp=2, microbatches=2, steps=2)
ON_FOUR_RANKS = {
    "drain": (compared, REPLICAS),
    "ddp": (compared, replace(REPLICAS, sync="ddp", schedule="1f1b")),
}


def on_every_rank(rank: int, world_size: int, name: str) -> Any:
    work, config = (ON_TWO_RANKS | ON_FOUR_RANKS)[name]
    return work(rank, config)


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[Any]]:
    """What every rank returned, by the name of what it did."""
    return dict(zip(ON_TWO_RANKS, run_each(on_every_rank, 2, ON_TWO_RANKS), strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_timing_changes_no_bit_under_any_schedule(on_two_ranks, schedule):
    config = ON_TWO_RANKS[schedule][1]
    timing = checked(config, on_two_ranks[schedule])
    bubble = timing.bubble
    assert bubble is not None
    reasons = bubble.fill_and_drain + bubble.imbalance + bubble.variation + bubble.transfer
    assert reasons == pytest.approx(bubble.measured)
    assert 0 < bubble.measured < 1
    assert 0 < timing.clock_error_seconds < 1
    assert len(timing.peak_bytes) == 2
    first, last = (timing.steps["train"][rank][-1] for rank in (0, 1))
    assert "loss" in region_names(last, "forward") & region_names(last, "backward")
    assert "loss" not in region_names(first, "forward")
    assert ("block 0" in region_names(first, "recompute")) == (config.recompute == "always")


@pytest.mark.multiprocess
def test_timing_changes_no_bit_with_replicas():
    answers = run_each(on_every_rank, 4, ON_FOUR_RANKS)
    for (_, config), by_rank in zip(ON_FOUR_RANKS.values(), answers, strict=True):
        timing = checked(config, by_rank)
        assert {own.replica for own in timing.accounts} == {0, 1}
        assert all(own.seconds["all-reduce"] > 0 for own in timing.accounts)
        for rank in range(4):
            for step in timing.steps["train"][rank]:
                kinds = [span.kind for span in step.spans]
                # Under ddp the last backward turns into the all-reduce; it is another one of
                # nothing that the step itself does afterwards.
                inside = kinds[kinds.index("all-reduce") - 1] == "backward"
                assert inside == (config.sync == "ddp")
                assert kinds.count("all-reduce") == (2 if config.sync == "ddp" else 1)


@pytest.mark.multiprocess
def test_partial_batches_are_recorded_apart_on_all_ranks(on_two_ranks):
    (timing,) = [t for t in on_two_ranks["partial"] if t is not None]
    of_steps = {row.step: (row.samples, row.full_batch) for row in timing.rows}
    train = {row.step: row.samples for row in timing.rows if row.phase == "train"}
    assert train == {2: 3, 3: 8, 4: 3, 5: 8}  # and none after that
    assert {full for _, full in of_steps.values()} == {8}
    for rank in range(2):
        assert [step.step for step in timing.steps["train"][rank]] == [3, 5]
        assert all(step.events for step in timing.steps["train"][rank])
    own = [r for r in timing.rows if r.rank == 0 and r.name == "step" and r.phase == "train"]
    expected = sum(row.seconds for row in own if row.step in (3, 5)) / 2
    assert timing.accounts[0].step_seconds == pytest.approx(expected)
    summary = timing.summary()
    assert summary["step_seconds"]["count"] == 2
    partial = [(batch["phase"], batch["samples"]) for batch in summary["partial_batches"]]
    assert partial == [("train", 3), ("test", 3)]


@pytest.mark.multiprocess
def test_spans_of_ranks_whose_clocks_drift_are_in_the_order_of_cause_and_effect(on_two_ranks):
    """With one offset from the end of the run, a stage's spans lay before those they wait for."""
    timing = on_two_ranks["drifting"][1]
    error = timing.clock_error_seconds
    assert error > 0
    for first, second in zip(timing.steps["train"][0], timing.steps["train"][1], strict=True):
        spans = {(s.kind, s.microbatch): s for s in first.spans if s.kind in COMPUTE}
        for span in (s for s in second.spans if s.kind in COMPUTE):
            other = spans[span.kind, span.microbatch]
            cause, effect = (other, span) if span.kind == "forward" else (span, other)
            # What arrives later was sent later: sending begins when computing ends.
            assert cause.end <= effect.start + error, (first.step, span)


def test_there_is_no_recorder_unless_asked_for():
    run = prepare(BASE, torch.float32)
    assert make_recorder(run, 0, CPU) is None
    for asked in ("timing", "trace"):
        options: dict[str, Any] = {asked: True, "timing_warmup": 1}
        config = replace(run.config, **options)
        recorder = make_recorder(replace(run, config=config), 0, CPU)
        assert recorder is not None
        assert (recorder.num_warmup, recorder.num_steps) == (1, 100)


# ---- what is told ----------------------------------------------------------------------------

LAYOUT = Layout(2, 3)


@pytest.fixture
def run() -> Run:
    config = replace(BASE, stages=2, microbatches=3, trace=True, timing_warmup=1)
    return prepare(config, torch.float32)


def made_up(layout: Layout = LAYOUT, num_steps: int = 2) -> Timing:
    steps = recorded(layout, num_steps=num_steps) if num_steps else {0: [], 1: []}
    for own in steps.values():
        for step in own:
            first = next(span for span in step.spans if span.kind == "forward")
            at = first.start, first.start + 0.5
            step.events.append(Event("block 0", "forward", first.stage, 0, *at))
    return Timing(
        layout=layout,
        num_warmup=4,
        rows=rows_of(steps, layout),
        steps={"train": steps, "test": {rank: [] for rank in steps}},
        clock_error_seconds=3e-5,
        overhead=0.0123,
        peak_bytes=[10_000_000, 20_000_000],
    )


def test_a_summary_has_step_accounts_bubble_and_memory():
    summary = made_up().summary()
    assert json.loads(json.dumps(summary)) == summary
    same = dict.fromkeys(("mean", "min", "max", "median", "p95"), 12)
    assert summary["step_seconds"] == same | {"std": 0, "count": 2}
    assert (summary["warmup_steps"], summary["overhead"]) == (4, 0.0123)
    assert (summary["clock_error_seconds"], summary["peak_bytes"]) == (3e-5, [10**7, 2 * 10**7])
    assert [own["compute"] for own in summary["accounting"]] == [9, 9]
    assert summary["bubble"]["measured"] == pytest.approx(0.25)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_of_a_run(tmp_path, run):
    timing = made_up()
    write_timing(timing, run, tmp_path, CPU)
    pictures = {"trace.json", "timeline.png", "timeline.svg"}
    assert names_in(tmp_path) == {"timing.csv", "timing.md", "timeline.json", *pictures}
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert (timeline["step"], timeline["microbatches"]) == (1, 3)
    for name in ("measured", "predicted"):
        assert min(span[2] for span in timeline[name]) == 0
        assert max(span[3] for span in timeline[name]) == 12
        assert [0, "forward", 0, 1, 0, 0] in timeline[name]
    markdown = (tmp_path / "timing.md").read_text()
    for words in ("# Timing of vig_digits", "## The bubble", "- command: `vigpipe", "- commit: "):
        assert words in markdown
    pixels = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).reshape(-1, 3)
    for kind in ("forward", "backward", "wait input", "wait gradient"):
        colour = tuple(bytes.fromhex(COLOURS[kind].removeprefix("#")))
        assert (pixels == colour).all(1).sum() > 500, kind


def test_a_run_that_ended_in_the_warm_up_says_so(tmp_path, run):
    # The bubble of no step at all was an error once.
    timing = made_up(num_steps=0)
    assert timing.summary()["step_seconds"] is None
    assert timing.summary()["bubble"] is None
    assert describe(timing).startswith("No step was timed: the run ended in the warm-up of 4.")
    write_timing(timing, run, tmp_path, CPU)
    assert names_in(tmp_path) == {"timing.csv", "timing.md"}


def test_the_description_has_the_account_and_the_bubble():
    text = describe(made_up())
    assert text.startswith("2 steps after a warm-up of 4: median 12000.000 ms, 12000.000 to ")
    assert "Timing itself costs 1.23% of a step." in text
    (line,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["1", "1"]]
    assert line[2:] == ["12000.00", "9000.00", "3000.00", *["0.00"] * 6, "0.00%"]
    assert "Ranks wait 25.0% of a step; (S - 1) / (V M + S - 1) gives 25.0%" in text
    assert "filling and draining +25.0%; unequal stages +0.0%" in text
    assert "rank 0: 10 MB, rank 1: 20 MB" in text


def test_the_origin_is_the_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["vigpipe", "train", "--data", "my pictures"])
    lines = origin(CPU).splitlines()
    assert lines[0] == "- command: `vigpipe train --data 'my pictures'`"
    assert lines[2].endswith("1 thread(s) a rank")


def test_timing_costs_what_the_rank_pays_that_pays_most(monkeypatch):
    """Clocks of the ranks are brought together; overhead is of the median step."""
    layout = Layout(1, 1)
    steps = [RecordedStep("train", 1, [], [])]
    rows = [
        Row("train", n, 0, 0, -1, "step", "", 1, seconds) for n, seconds in ((1, 2.0), (2, 4.0))
    ]
    recorder = SimpleNamespace(
        rank=0, steps={"train": steps, "test": []}, num_stamps=50, num_warmup=1, clock=None
    )
    recorder.take_rows = lambda: rows
    monkeypatch.setattr("vigpipe.analysis.run_timing.stamp_seconds", lambda clock, device: 0.003)
    job = SimpleNamespace(unit="images")
    rank_state: Any = SimpleNamespace(
        recorder=recorder, device=CPU, run=SimpleNamespace(layout=layout, job=job), is_writer=True
    )
    timing = gather_timing(rank_state, read_clocks())
    assert timing is not None
    assert timing.overhead == pytest.approx(50 * 0.003 / 3)
