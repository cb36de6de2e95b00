"""Our orders against what torch's own schedules do, action by action."""

from typing import Any, Literal

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout
from vigpipe.schedules import SCHEDULES, VIRTUAL, is_legal, orders
from vigpipe.schedules.rule import Action

pytestmark = pytest.mark.oldest

TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
}
KINDS: dict[str, Literal["forward", "backward"]] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
}
DEGREES = [
    (schedule, num_ranks, virtual_stages, num_microbatches)
    for schedule in SCHEDULES
    for num_ranks in (2, 3, 4)
    for virtual_stages in ((1, 2, 3) if schedule in VIRTUAL else (1,))
    for num_microbatches in (1, 2, 3, 4, 6, 8)
    if is_legal(schedule, num_ranks, virtual_stages, num_microbatches)
]


class Stage:
    """Writes down what a schedule asks of it, and sends nothing."""

    def __init__(self, index, num_ranks, num_stages, actions):
        self.stage_index, self.num_stages, self.actions = index, num_stages, actions
        self.group_rank, self.group_size, self.group = index % num_ranks, num_ranks, None
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod, self.has_backward = torch.nn.Identity(), True

    def forward_one_chunk(self, microbatch, *args, **options):
        self.actions.append(Action("forward", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch, **options):
        self.actions.append(Action("backward", self.stage_index, microbatch))

    def nothing(*args, **options):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    clear_runtime_states = scale_grads = perform_reduce_grad = release_fwd_send_outputs = nothing


def run_alone(schedule, num_ranks, virtual_stages, num_microbatches, rank):
    """What torch's schedule makes the stages of one rank do, without any other rank.

    Single-stage schedules decide while they run, so they are run; `_get_pipeline_order` of 1F1B
    numbers the last stage's forwards from 1.
    """
    num_stages, actions = num_ranks * virtual_stages, []
    stages = [Stage(i, num_ranks, num_stages, actions) for i in range(rank, num_stages, num_ranks)]
    several = schedule in VIRTUAL
    made = TORCH[schedule](
        stages if several else stages[0], num_microbatches, loss_fn=lambda *_: None
    )
    if several:
        # These decide beforehand.
        return [
            Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in made.pipeline_order[rank]
            if a is not None
        ]
    made._initialize_stage = made._maybe_compute_loss = made._maybe_get_loss = Stage.nothing
    made._update_losses, made._finalize_gradients = Stage.nothing, True
    inputs = [()] * num_microbatches, [{}] * num_microbatches
    made._step_microbatches(*inputs, return_outputs=False)
    return actions


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_orders_are_those_of_torch(schedule):
    chosen = [degrees for degrees in DEGREES if degrees[0] == schedule]
    assert len(chosen) > 10
    for _, size, virtual_stages, num_microbatches in chosen:
        degrees = size, virtual_stages, num_microbatches
        for rank, own in enumerate(orders(schedule, *degrees)):
            assert list(own) == run_alone(schedule, *degrees, rank)


def test_the_pictures_at_the_top_of_the_file():
    def picture(actions, with_stage):
        return " ".join(
            a.kind[0].upper() + f"{a.stage}." * with_stage + str(a.microbatch) for a in actions
        )

    assert picture(orders("gpipe", 2, 1, 3)[0], False) == "F0 F1 F2 B0 B1 B2"
    assert picture(orders("1f1b", 2, 1, 3)[0], False) == "F0 F1 B0 F2 B1 B2"
    looped = "F0.0 F0.1 F2.0 F2.1 B2.1 B2.0 B0.1 B0.0"
    assert picture(orders("loopedbfs", 2, 2, 2)[0], True) == looped
    interleaved = orders("interleaved1f1b", 2, 2, 2)
    assert picture(interleaved[0], True) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert picture(interleaved[1], True) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_takes_each_micro_batch_there_and_back(schedule):
    virtual_stages = 2 if schedule in VIRTUAL else 1
    (own,) = orders(schedule, 1, virtual_stages, 3)
    assert [a.microbatch for a in own] == sorted(a.microbatch for a in own)
    first = [(a.kind, a.stage) for a in own if a.microbatch == 0]
    there = [("forward", i) for i in range(virtual_stages)]
    assert first == there + [("backward", i) for i in reversed(range(virtual_stages))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_legal_is_what_a_layout_accepts(schedule):
    for num_ranks in range(6):
        for virtual_stages in range(4):
            for num_microbatches in range(14):
                try:
                    Layout(
                        pipeline_size=num_ranks,
                        num_microbatches=num_microbatches,
                        schedule=schedule,
                        virtual_stages=virtual_stages,
                    )
                    accepted = True
                except InputError:
                    accepted = False
                degrees = schedule, num_ranks, virtual_stages, num_microbatches
                assert is_legal(*degrees) == accepted
