"""Where a step's time goes: steps made up so that the answer is known."""

from collections.abc import Callable, Sequence

import pytest

from tests.report.runs import seconds_by_kind
from vigpipe.analysis.account import make_accounts
from vigpipe.analysis.bubble import (
    Bubble,
    explain_bubble,
    ideal_bubble,
    mean_times,
    predicted_spans,
)
from vigpipe.parallel.layout import Layout
from vigpipe.spans import Span, SpanKind, by_rank, step_seconds
from vigpipe.timing.recorder import Phase, RecordedStep, Row

Seconds = Callable[[SpanKind, int, int], float]  # of a kind, a stage and a micro-batch
GPIPE = Layout(2, 3)


def equal(kind: SpanKind, stage: int, microbatch: int) -> float:
    return 1.0 if kind == "forward" else 2.0


def simulated(layout: Layout, seconds: Seconds) -> list[Span]:
    stages = range(layout.pipeline_size * layout.virtual_stages)
    pieces = range(layout.num_microbatches)
    times: dict[SpanKind, list[list[float]]] = {
        k: [[seconds(k, s, m) for m in pieces] for s in stages] for k in ("forward", "backward")
    }
    return predicted_spans(times, layout)


def recorded(
    layout: Layout, seconds: Seconds = equal, before: Sequence[Span] = (), num_steps: int = 2
) -> dict[int, list[RecordedStep]]:
    """Steps as ranks record them that take no time for anything else.

    A rank that has ended begins the next step, and waits there for the others.

    Args:
        layout: one replica's shape; all are the same.
        seconds: of every forward and backward.
        before: spans of rank 0 that every rank's step begins with.
        num_steps: so often.
    """
    spans = simulated(layout, seconds)
    length = step_seconds(spans)
    steps: dict[int, list[RecordedStep]] = {}
    for position, own in by_rank(spans).items():
        own = [*before, *own]
        if own[-1].end < length:
            own.append(Span(position, "wait input", own[-1].end, length))
        for replica in range(layout.num_replicas):
            rank = replica * layout.pipeline_size + position
            mine = [span._replace(rank=rank) for span in own]
            steps[rank] = [RecordedStep("train", number, mine, []) for number in range(num_steps)]
    return steps


def rows_of(steps: dict[int, list[RecordedStep]], layout: Layout) -> list[Row]:
    """Rows of timing.csv; the step is the sum of its spans."""
    rows = []
    for rank, own in steps.items():
        for step in own:
            totals = {"step": sum(span.seconds for span in step.spans)} | {
                kind: seconds for kind, seconds in seconds_by_kind(step.spans).items() if seconds
            }
            rows += [
                Row("train", step.step, rank, layout.replica_index(rank), -1, name, "", 1, total)
                for name, total in totals.items()
            ]
    return rows


def explained(layout: Layout, seconds: Seconds = equal, before: Sequence[Span] = ()) -> Bubble:
    steps = recorded(layout, seconds, before)
    bubble = explain_bubble(make_accounts(rows_of(steps, layout), layout), steps, layout)
    assert bubble is not None
    reasons = bubble.fill_and_drain + bubble.imbalance + bubble.variation + bubble.transfer
    assert reasons == pytest.approx(bubble.measured)
    return bubble


# ---- accounts --------------------------------------------------------------------------------


def test_an_account_is_the_mean_over_the_training_steps():
    def row(step: int, name: str, seconds: float, phase: Phase = "train", stage: int = -1) -> Row:
        return Row(phase, step, 3, 1, stage, name, "", 1, seconds)

    rows = [
        row(1, "step", 10.0),
        row(1, "forward", 3.0, stage=1),
        row(1, "backward", 5.0, stage=1),
        row(1, "wait input", 1.5, stage=1),
        row(1, "between steps", 99.0),
        row(1, "block 3", 99.0, stage=1),
        row(2, "step", 12.0),
        row(2, "forward", 10.0, stage=1),
        row(2, "send", 1.0, stage=1),
        row(2, "all-reduce", 0.5),
        row(1, "step", 99.0, phase="test"),
    ]
    (own,) = make_accounts(rows, Layout(2, 2, 2))
    assert (own.rank, own.replica, own.stages) == (3, 1, (1,))
    assert own.step_seconds == 11
    assert own.seconds["compute"] == 9
    assert own.waiting == 1.25  # what waits to leave is waiting too
    assert own.seconds["all-reduce"] == 0.25
    assert own.seconds["unaccounted"] == pytest.approx(0.5)
    assert own.as_table() == {
        **{"rank": 3, "replica": 1, "stages": [1], "step_seconds": 11},
        **own.seconds,
    }


# ---- the bubble ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "formula"),
    [
        (Layout(4, 8), 3 / 11),
        (Layout(2, 4, 2, "1f1b"), 1 / 5),
        (Layout(2, 4, 1, "interleaved1f1b", 2), 1 / 9),
    ],
)
def test_equal_stages_wait_as_the_formula_says(layout, formula):
    bubble = explained(layout)
    assert bubble.measured == pytest.approx(formula)
    assert bubble.formula == ideal_bubble(layout) == formula
    assert bubble.fill_and_drain == pytest.approx(formula)  # so that nothing else has a part


def test_an_unequal_stage_is_imbalance():
    # Rank 1 takes 9 + 9 s for its three micro-batches; rank 0 fills and drains in 1 + 2 s more.
    bubble = explained(GPIPE, lambda kind, stage, m: equal(kind, stage, m) * (1 + stage))
    assert bubble.measured == pytest.approx((21 - (9 + 18) / 2) / 21)
    assert bubble.fill_and_drain == pytest.approx((4 * 4.5 - 13.5) / 21)
    assert bubble.imbalance == pytest.approx(bubble.measured - bubble.fill_and_drain)
    assert bubble.variation == pytest.approx(0)
    assert bubble.transfer == pytest.approx(0)


def test_unequal_microbatches_are_variation():
    # Each stage is as slow as the other in the mean, but not with the same micro-batches: forwards
    # end after 2, 3, 4 s on rank 0, and 3, 4, 6 s on rank 1, instead of after 16 / 3 s.
    slow = {("forward", 0, 0), ("forward", 1, 2)}
    bubble = explained(GPIPE, lambda k, s, m: equal(k, s, m) * (2 if (k, s, m) in slow else 1))
    assert bubble.measured == pytest.approx((14 - 10) / 14)
    assert bubble.fill_and_drain == pytest.approx((4 * 10 / 3 - 10) / 14)
    assert bubble.imbalance == pytest.approx(0)
    assert bubble.variation == pytest.approx(2 / 3 / 14)
    assert bubble.transfer == pytest.approx(0)


def test_waiting_that_no_schedule_explains_is_transfer():
    waits = [Span(0, "wait input", -1.0, -0.5, 0, 0), Span(0, "send", -0.5, 0.0, 0, 0)]
    bubble = explained(GPIPE, before=waits)
    assert bubble.measured == pytest.approx((3 + 1) / 13)
    assert bubble.fill_and_drain == pytest.approx(3 / 13)
    assert bubble.imbalance == pytest.approx(0)
    assert bubble.variation == pytest.approx(0)
    assert bubble.transfer == pytest.approx(1 / 13)


def test_what_is_no_waiting_makes_the_bubble_a_smaller_share():
    bubble = explained(GPIPE, before=[Span(0, "optimizer", -12.0, 0.0)])
    assert bubble.measured == pytest.approx(3 / 24)
    assert bubble.formula == 1 / 4  # of the schedule alone
    assert bubble.transfer == pytest.approx(0)


def test_a_run_of_which_nothing_was_recorded_has_none():
    # The run may have ended in its warm-up.
    assert explain_bubble([], {0: [], 1: []}, GPIPE) is None
    steps = recorded(GPIPE)
    accounts = make_accounts(rows_of(steps, GPIPE), GPIPE)
    assert explain_bubble(accounts, {0: steps[0], 1: []}, GPIPE) is None


# ---- the predicted step ----------------------------------------------------------------------


def test_mean_times_are_over_steps_replicas_and_microbatches():
    layout = Layout(2, 2, 2)
    steps = recorded(layout, lambda kind, stage, m: 1.0 + stage + 2 * m, num_steps=1)
    assert mean_times(steps, layout) == {
        "forward": [[2.0, 2.0], [3.0, 3.0]],
        "backward": [[2.0, 2.0], [3.0, 3.0]],
    }
