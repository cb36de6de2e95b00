"""Schedules of which every rank takes all its forwards before its first backward."""

from collections.abc import Iterator
from functools import partial

from vigpipe.schedules.rule import Action, Degrees, Rule


def _order(rank: int, degrees: Degrees, reverses: bool = False) -> Iterator[Action]:
    stages, microbatches = degrees.stages_of(rank), range(degrees.num_microbatches)
    for stage in stages:
        for microbatch in microbatches:
            yield Action("forward", stage, microbatch)
    for stage in reversed(stages):
        for microbatch in reversed(microbatches) if reverses else microbatches:
            yield Action("backward", stage, microbatch)


GPIPE = Rule("torch.distributed.pipelining:ScheduleGPipe", _order)
LOOPED_BFS = Rule(
    "torch.distributed.pipelining:ScheduleLoopedBFS",
    partial(_order, reverses=True),
    is_virtual=True,
    reverses=True,
)
