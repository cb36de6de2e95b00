"""Define the schedules: their names, their requirements, and their order of actions.

The order of a rank's forwards and backwards is that of torch's schedules. With two ranks and three
micro-batches (F forward, B backward):

    gpipe   rank 0   F0 F1 F2 B0 B1 B2      1f1b   rank 0   F0 F1 B0 F2 B1 B2
            rank 1   F0 F1 F2 B0 B1 B2             rank 1   F0 B0 F1 B1 F2 B2

With two virtual stages, rank 0 holds stages 0 and 2 (F2.1: forward of micro-batch 1 in stage 2):

    loopedbfs        rank 0   F0.0 F0.1 F2.0 F2.1 B2.1 B2.0 B0.1 B0.0
    interleaved1f1b  rank 0   F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
                     rank 1   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
"""

import math
from typing import Literal, NamedTuple, get_args

Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
VIRTUAL: tuple[Schedule, ...] = ("interleaved1f1b", "loopedbfs")  # a rank holds several stages


class Action(NamedTuple):
    """The forward or the backward of one micro-batch through one stage.

    Attributes:
        kind: `forward` or `backward`.
        stage: index of the stage, virtual ones counted; stage i runs on pipeline rank i mod S.
        microbatch: index of the micro-batch in the replica.
    """

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int


def messages_ahead(schedule: Schedule, device: str) -> float:
    """Return how many messages of a kind a rank asks for before it needs them.

    Torch's schedules with several stages a rank ask for all that come in a while, the others for
    none. On CPUs, which use gloo, `vigpipe.parallel.stage` makes that one.
    """
    if schedule in VIRTUAL:
        return math.inf
    return 1 if device == "cpu" else 0


Orders = tuple[tuple[Action, ...], ...]  # the actions of each rank of a pipeline, by pipeline_rank


def check_degrees(
    schedule: Schedule, pipeline_size: int, virtual_stages: int, num_microbatches: int
) -> str | None:
    """Check whether a schedule can run with these degrees, each of at least 1.

    The degrees are, here and below: S, the ranks of one pipeline; V, the stages that each rank
    holds; M, the micro-batches of one replica.

    Returns:
        None if it can; else a sentence for the user that says why not and what to change.
    """
    if virtual_stages > 1 and schedule not in VIRTUAL:
        return (
            f"--virtual-stages {virtual_stages}: --schedule {schedule} runs one stage a rank; "
            f"choose --schedule {' or '.join(VIRTUAL)}"
        )
    if schedule == "1f1b" and num_microbatches < pipeline_size:
        return (
            "--schedule 1f1b needs at least as many micro-batches as stages, got --microbatches "
            f"{num_microbatches} < --stages {pipeline_size}; raise --microbatches or choose "
            "--schedule gpipe"
        )
    rounds = _num_rounds(pipeline_size, num_microbatches)
    if schedule == "interleaved1f1b" and num_microbatches % rounds:
        return (
            f"--schedule interleaved1f1b runs {num_microbatches} micro-batches in {rounds} equal "
            f"rounds over {pipeline_size} ranks, and {num_microbatches} is not a multiple of "
            f"{rounds}; choose --microbatches {pipeline_size * rounds} or "
            f"{pipeline_size * (rounds + 1)}"
        )
    return None


def is_legal(
    schedule: Schedule, pipeline_size: int, virtual_stages: int, num_microbatches: int
) -> bool:
    """Whether a schedule can run with these degrees; `check_degrees` says why not."""
    degrees = pipeline_size, virtual_stages, num_microbatches
    return min(degrees) >= 1 and check_degrees(schedule, *degrees) is None


def orders(
    schedule: Schedule, pipeline_size: int, virtual_stages: int, num_microbatches: int
) -> Orders:
    """List the actions of every rank of one pipeline in a training step, in their order.

    A pipeline of one rank ignores the schedule: it takes every micro-batch through all its stages
    and back before the next one.
    """
    if pipeline_size == 1:
        return (_alone(virtual_stages, num_microbatches),)
    by_rank: list[tuple[Action, ...]] = []
    for rank in range(pipeline_size):
        stages = range(rank, pipeline_size * virtual_stages, pipeline_size)
        if schedule in ("gpipe", "loopedbfs"):
            # loopedbfs takes the backwards in reverse order, gpipe in the order of the forwards.
            backward_microbatches = range(num_microbatches)[:: -1 if schedule == "loopedbfs" else 1]
            forward = [Action("forward", i, m) for i in stages for m in range(num_microbatches)]
            backward = [
                Action("backward", i, m) for i in reversed(stages) for m in backward_microbatches
            ]
            by_rank.append((*forward, *backward))
        elif schedule == "1f1b":
            by_rank.append(_alternating(stages, num_microbatches, pipeline_size - 1 - rank, 1))
        else:
            in_round = num_microbatches // _num_rounds(pipeline_size, num_microbatches)
            ahead = (virtual_stages - 1) * in_round + 2 * (pipeline_size - 1 - rank)
            by_rank.append(_alternating(stages, num_microbatches, ahead, in_round))
    return tuple(by_rank)


def forward_orders(
    schedule: Schedule, pipeline_size: int, virtual_stages: int, num_microbatches: int
) -> Orders:
    """List each rank's actions in inference: those of training without the backwards."""
    return tuple(
        tuple(action for action in actions if action.kind == "forward")
        for actions in orders(schedule, pipeline_size, virtual_stages, num_microbatches)
    )


def _num_rounds(pipeline_size: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // pipeline_size)


def _alternating(
    stages: range, num_microbatches: int, ahead: int, in_round: int
) -> tuple[Action, ...]:
    """List `ahead` forwards, then forwards and backwards in turn, then the remaining backwards.

    After every `in_round` micro-batches the rank moves on to the next of its stages, and after the
    last stage to the first.
    """
    num_each = len(stages) * num_microbatches
    turn = [
        (i, start + m)
        for start in range(0, num_microbatches, in_round)
        for i in range(len(stages))
        for m in range(in_round)
    ]
    forward = [Action("forward", stages[i], m) for i, m in turn]
    backward = [Action("backward", stages[len(stages) - 1 - i], m) for i, m in turn]
    ahead = min(ahead, num_each)
    actions = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        actions += [f, b]
    return (*actions, *backward[num_each - ahead :])


def _alone(virtual_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    stages = range(virtual_stages)
    return tuple(
        action
        for m in range(num_microbatches)
        for action in (
            *(Action("forward", i, m) for i in stages),
            *(Action("backward", i, m) for i in reversed(stages)),
        )
    )
