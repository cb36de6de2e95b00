"""What a rank's recorder makes of what it is told: spans without gaps, and regions in them."""

import weakref
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
import torch

from vigpipe.model.regions import listening
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.variants import create_model
from vigpipe.timing.clock import HostClock
from vigpipe.timing.recorder import NUM_CLOSE_STEPS, PHASES, Event, Phase, RecordedStep, Recorder


class Ticks(HostClock):
    """A clock that goes on by one whenever it is read."""

    def __init__(self) -> None:
        ticks = count()
        self.stamp = lambda: float(next(ticks))  # pyrefly: ignore[bad-assignment, bad-override]


def make(num_warmup: int = 0, num_steps: int = 10, clock: HostClock | None = None) -> Recorder:
    return Recorder(clock or Ticks(), 3, 1, num_warmup, num_steps)


def picture(step: RecordedStep) -> str:
    """The spans as one line; time is left out, but they must follow each other."""
    for before, after in pairwise(step.spans):
        assert before.end == after.start
    assert all(span.end > span.start for span in step.spans)
    return " | ".join(
        span.kind + (f" {span.stage}.{span.microbatch}" if span.stage >= 0 else "")
        for span in step.spans
    )


def rows_of(recorder: Recorder) -> dict[tuple[str, int, str, str], tuple[int, float]]:
    return {
        (row.phase, row.step, row.name, row.direction): (row.count, row.seconds)
        for row in recorder.take_rows()
    }


# ---- spans -----------------------------------------------------------------------------------


def test_a_stamp_ends_a_span_and_begins_the_next():
    recorder = make()
    with recorder.step("train", 5):
        recorder.enter("forward", 2, 0)
        recorder.leave()
        recorder.enter("backward", 2, 0)
        recorder.leave()
        recorder.enter("all-reduce")
        recorder.enter("optimizer")
    (step,) = recorder.steps["train"]
    assert (step.phase, step.step) == ("train", 5)
    assert picture(step) == (
        "other | forward 2.0 | other | backward 2.0 | other | all-reduce | optimizer"
    )
    assert {span.rank for span in step.spans} == {3}


def test_what_begins_says_what_the_gap_before_it_was():
    recorder = make()
    with recorder.step("train", 1):
        recorder.enter("other")
        recorder.leave()  # a receive is posted
        recorder.enter("forward", 1, 0, gap="wait input")
        recorder.leave()
        recorder.enter("send", 1, 0, gap="send")
        recorder.leave()
        recorder.enter("backward", 1, 0, gap="wait gradient")
        recorder.leave()
    assert picture(recorder.steps["train"][0]) == (
        "other | other | wait input 1.0 | forward 1.0 | send | send 1.0 | wait gradient 1.0 | "
        "backward 1.0 | other"
    )


def test_what_is_resumed_has_not_been_interrupted():
    recorder = make()
    with recorder.step("train", 1):
        recorder.enter("forward", 1, 0)
        recorder.leave()
        recorder.resume()
        recorder.resume()  # it goes on already
        recorder.leave()
    step = recorder.steps["train"][0]
    assert picture(step) == "other | forward 1.0 | other"
    assert step.spans[1].seconds == 2  # its first end lies inside


def test_the_warm_up_is_left_out_and_no_more_than_asked_for_is_recorded():
    recorder = make(num_warmup=2, num_steps=3)
    for number in range(1, 9):
        for phase in PHASES:
            with recorder.step(phase, number):
                recorder.enter("forward", 0, 0)
    recorder.leave()  # outside of a step
    assert recorder.region("sum", sum, ([1, 2],)) == 3
    for phase in ("train", "test"):
        assert [step.step for step in recorder.steps[phase]] == [3, 4, 5]
    assert {row.step for row in recorder.take_rows()} == {3, 4, 5}
    assert recorder.take_rows() == []


def test_batches_of_a_second_evaluation_are_counted_on():
    # Once they had the numbers of the first, and a table took the longer of the two for both.
    recorder = make()
    for _ in range(2):
        for number in (1, 2):
            with recorder.step("test", number):
                recorder.enter("forward", 0, 0)
    assert [step.step for step in recorder.steps["test"]] == [1, 2, 3, 4]


def test_the_time_between_two_steps_is_a_row_of_the_second():
    recorder = make()
    phases: tuple[Phase, ...] = ("train", "train", "test", "train", "train")
    for phase, number in zip(phases, (1, 2, 1, 4, 5), strict=True):
        with recorder.step(phase, number):
            recorder.enter("forward", 0, 0)
    between = {key[:2] for key in rows_of(recorder) if key[2] == "between steps"}
    assert between == {("train", 2), ("train", 5)}


def test_rows_add_up_what_has_one_name():
    recorder = make()
    with recorder.step("train", 7):
        for microbatch in (0, 1):
            recorder.enter("forward", 2, microbatch)
            recorder.region("stem", abs, (-1,))
        recorder.enter("other")
    rows = {(row.name, row.direction): row for row in recorder.take_rows()}
    forward, stem = rows["forward", ""], rows["stem", "forward"]
    assert (forward.count, forward.seconds) == (2, 6.0)  # a region is two stamps
    assert (stem.count, stem.seconds) == (2, 2.0)
    for row in (forward, stem):
        assert (row.phase, row.step, row.rank, row.replica, row.stage) == ("train", 7, 3, 1, 2)
    assert (rows["step", ""].stage, rows["step", ""].count) == (-1, 1)


def steps_of(num_warmup: int, num_steps: int, batches: str) -> Recorder:
    """A recorder of steps, F with full and p with partial batches."""
    recorder = make(num_warmup, num_steps)
    for number, batch in enumerate(batches):
        with recorder.step("train", number, 1000 if batch == "F" else 280, 1000):
            recorder.enter("forward", 0, 0)
            recorder.region("stem", abs, (-1,))
    return recorder


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ("FFFFFFFF", " FFF    "),
        ("FpFpFpFpFpFp", " pFpFpF     "),
        ("pppppppp", " ppp    "),
        ("FppppFpFF", " ppp F FF"),  # as many partial ones at most
    ],
)
def test_partial_batches_take_no_recorded_step_away_from_full_ones(batches, expected):
    recorder = steps_of(1, 3, batches)
    numbers = [step.step for step in recorder.steps["train"]]
    assert numbers == [number for number, kind in enumerate(expected) if kind != " "]
    assert [step.is_full for step in recorder.steps["train"]] == [
        kind == "F" for kind in expected if kind != " "
    ]
    for row in recorder.take_rows():
        assert (row.samples, row.full_batch) == (1000 if row.is_full else 280, 1000)
        assert row.is_full == (batches[row.step] == "F")


def test_regions_are_kept_one_by_one_in_the_last_steps_of_each_kind_of_batch():
    steps = steps_of(0, 9, "FF" + "pF" * (NUM_CLOSE_STEPS + 1)).steps["train"]
    for is_full in (True, False):
        kept = [bool(step.events) for step in steps if step.is_full == is_full]
        assert kept[-NUM_CLOSE_STEPS:] == [True] * NUM_CLOSE_STEPS
        assert not any(kept[:-NUM_CLOSE_STEPS])
    assert all(step.spans for step in steps)


def test_stamps_are_counted_of_training_steps_with_full_batches():
    # Once a test batch, which has no backward, stood for the steps.
    recorder = make()
    for samples in (280, 1000, 280):
        with recorder.step("train", samples, samples, 1000):
            for microbatch in range(samples // 200):
                recorder.enter("forward", 0, microbatch)
                recorder.region("stem", abs, (-1,))
    with recorder.step("test", 1):
        recorder.enter("forward", 0, 0)
    assert recorder.num_stamps == 1 + 5 * 3


# ---- regions ---------------------------------------------------------------------------------


def digits(recompute: bool = False, **options: Any) -> StagedModel:
    torch.manual_seed(0)
    model = create_model("vig_digits", num_classes=3, in_chans=1, img_size=(8, 8), **options)
    model.recompute = recompute
    return model.train()


def recorded(model: Any, images: torch.Tensor, num_microbatches: int = 1) -> list[Event]:
    """Events of a step, on a clock that tells every two stamps apart."""
    recorder = make()
    keys = torch.arange(len(images))
    with recorder.step("train", 1), listening(recorder.region):
        for microbatch in range(num_microbatches):
            recorder.enter("forward", 0, microbatch)
            logits = model(images, keys)
            loss = recorder.region("loss", torch.Tensor.sum, (logits,))
            recorder.leave()
            recorder.enter("backward", 0, microbatch)
            loss.backward()
            recorder.leave()
    (step,) = recorder.steps["train"]
    for event in step.events:
        kind = "forward" if event.direction == "forward" else "backward"
        (around,) = [s for s in step.spans if (s.kind, s.microbatch) == (kind, event.microbatch)]
        assert around.start <= event.start < event.end <= around.end
    return step.events


def names(events: Sequence[Event], direction: str) -> list[str]:
    return [
        e.name for e in sorted(events, key=lambda e: (e.start, -e.end)) if e.direction == direction
    ]


def assert_nested(events: Sequence[Event]) -> None:
    """No two events of a rank overlap but one inside the other; a child lies in its parent."""
    for a in events:
        for b in events:
            assert a.end <= b.start or b.end <= a.start or _within(a, b) or _within(b, a)
        parent = a.name.rpartition("/")[0]
        if parent:
            own = [
                e
                for e in events
                if (e.name, e.direction, e.microbatch) == (parent, a.direction, a.microbatch)
            ]
            assert len(own) == 1, (a, own)
            assert _within(a, own[0]), (a, own[0])


def _within(a: Event, b: Event) -> bool:
    return b.start <= a.start and a.end <= b.end


BLOCK = ("", "/grapher", "/grapher/knn", "/grapher/aggregation", "/ffn")


def test_regions_of_a_step_forward_and_backward():
    events = recorded(digits(), torch.rand(2, 1, 8, 8), num_microbatches=2)
    assert_nested(events)
    blocks = [f"block {i}{part}" for i in range(4) for part in BLOCK]
    assert names(events, "forward") == ["stem", *blocks, "readout", "loss"] * 2
    back = [
        f"block {i}{part}"
        for i in reversed(range(4))
        for part in ("", "/ffn", "/grapher", "/grapher/aggregation")
    ]
    assert names(events, "backward") == ["loss", "readout", *back, "stem"] * 2
    # Both wait for the gradient of the same tensor; the hook of the block's last part was called
    # first, and the block seemed to begin after it.
    began = {e.name: e.start for e in events if (e.direction, e.microbatch) == ("backward", 1)}
    assert [began[f"block {i}"] for i in range(4)] == [began[f"block {i}/ffn"] for i in range(4)]


@pytest.mark.parametrize("graph", ["window", "reuse", "lookahead"])
def test_regions_nest_with_every_graph_and_aggregator(graph):
    events = recorded(digits(graph=graph, aggregator="edge,sage,gin"), torch.rand(2, 1, 8, 8))
    assert_nested(events)
    assert names(events, "backward")[:4] == ["loss", "readout", "block 3", "block 3/ffn"]


def test_regions_of_the_study():
    events = recorded(VigStudy(3, 2, (4, 4)).train(), torch.rand(2, 2, 4, 4))
    assert_nested(events)
    assert "block 7/grapher/aggregation" in names(events, "backward")
    assert "stem" not in names(events, "backward")  # the pixels are the nodes: nothing to learn


def test_a_recomputed_region_keeps_its_path():
    # torch leaves the repetition by an exception once it has all that the backward needs; regions
    # were lost then, and those that came later were taken for parts of them.
    model = digits(recompute=True, aggregator="max,edge,sage")
    events = recorded(model, torch.rand(2, 1, 8, 8), num_microbatches=2)
    assert_nested(events)
    repeated = names(events, "recompute")
    order = [
        f"block {i}{part}"
        for i in reversed(range(4))
        for part in ("", "/grapher", "/grapher/aggregation", "/ffn")  # neighbours are remembered
    ]
    assert repeated == order * 2
    for name in ("block 3", "block 0"):
        forward, again, back = (
            next(e for e in events if (e.name, e.direction) == (name, direction))
            for direction in ("forward", "recompute", "backward")
        )
        assert forward.end < back.start
        assert _within(again, back)  # the backward includes it


def test_what_ddp_adds_up_inside_a_backward_is_none_of_the_regions():
    recorder = make()
    weight = torch.ones(1, requires_grad=True)
    with recorder.step("train", 1):
        recorder.enter("forward", 0, 0)
        y = recorder.region("stem", lambda x: x * weight, (torch.ones(1),))
        recorder.leave()
        recorder.enter("backward", 0, 0)
        weight.register_post_accumulate_grad_hook(lambda _: recorder.enter("all-reduce"))
        y.backward()
        recorder.leave()
    (step,) = recorder.steps["train"]
    assert picture(step) == "other | forward 0.0 | other | backward 0.0 | all-reduce | other"
    back = next(event for event in step.events if event.direction == "backward")
    assert back.end == step.spans[3].end


def test_an_alias_has_the_strides_of_what_it_stands_for():
    # view_as gives dimensions of size 1 other strides, forward and backward.
    strides = (3, 8, 5, 1)
    x = torch.zeros(40, requires_grad=True).as_strided((1, 4, 1, 8), strides)
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.stride()))
    recorder = make()

    def inside(alias):
        assert alias is not x
        assert alias.stride() == strides
        return alias

    with recorder.step("train", 1):
        recorder.enter("forward", 0, 0)
        y = recorder.region("some", inside, (x,))
        y.backward(torch.zeros(40).as_strided(x.shape, strides))
    assert seen == [strides]


def test_a_recorder_keeps_no_features():
    recorder = make()
    x = torch.ones(1, requires_grad=True)
    with recorder.step("train", 1):
        recorder.enter("forward", 0, 0)
        y = recorder.region("some", torch.neg, (x,))
        kept = weakref.ref(y)
        del y
        assert kept() is None
