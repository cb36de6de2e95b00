"""The schedules: their names, their requirements, and their order of actions.

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
from typing import Literal, get_args

from vigpipe.schedules import alternating, breadth_first
from vigpipe.schedules.rule import Action, Degrees, Rule

Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
RULES: dict[Schedule, Rule] = {
    "gpipe": breadth_first.GPIPE,
    "1f1b": alternating.ONE_F_ONE_B,
    "interleaved1f1b": alternating.INTERLEAVED_1F1B,
    "loopedbfs": breadth_first.LOOPED_BFS,
}
Orders = tuple[tuple[Action, ...], ...]  # the actions of each rank of a pipeline, by pipeline_rank
VIRTUAL: tuple[Schedule, ...] = tuple(name for name in SCHEDULES if RULES[name].is_virtual)


def messages_ahead(schedule: Schedule, device: str) -> float:
    """Return how many messages of a kind a rank asks for before it needs them.

    Torch's schedules with several stages a rank ask for all that come in a while, the others for
    none. On CPUs, which use gloo, `vigpipe.parallel.stage` makes that one.
    """
    if schedule in VIRTUAL:
        return math.inf
    return 1 if device == "cpu" else 0


def check_degrees(
    schedule: Schedule, pipeline_size: int, virtual_stages: int, num_microbatches: int
) -> str | None:
    """Say why a schedule cannot run with degrees from 1 on, and what to change; None if it can."""
    if virtual_stages > 1 and schedule not in VIRTUAL:
        return (
            f"--virtual-stages {virtual_stages}: --schedule {schedule} runs one stage a rank; "
            f"choose --schedule {' or '.join(VIRTUAL)}"
        )
    return RULES[schedule].why_not(Degrees(pipeline_size, virtual_stages, num_microbatches))


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

    One rank alone takes every micro-batch through all its stages and back before the next one.
    """
    degrees = Degrees(pipeline_size, virtual_stages, num_microbatches)
    if pipeline_size == 1:
        return (_alone(degrees),)
    order = RULES[schedule].order
    return tuple(tuple(order(rank, degrees)) for rank in range(pipeline_size))


def _alone(degrees: Degrees) -> tuple[Action, ...]:
    actions: list[Action] = []
    for m in range(degrees.num_microbatches):
        actions += [Action("forward", i, m) for i in degrees.stages_of(0)]
        actions += [Action("backward", i, m) for i in reversed(degrees.stages_of(0))]
    return tuple(actions)
