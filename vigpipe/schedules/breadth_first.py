"""Schedules of which every rank takes all its forwards before its first backward."""

from collections.abc import Iterator

from vigpipe.schedules.rule import Action, Degrees, Rule


def _order(rank: int, degrees: Degrees) -> Iterator[Action]:
    yield from _forwards(rank, degrees)
    for stage in reversed(degrees.stages_of(rank)):
        for microbatch in range(degrees.num_microbatches):
            yield Action("backward", stage, microbatch)


def _reversed_order(rank: int, degrees: Degrees) -> Iterator[Action]:
    yield from _forwards(rank, degrees)
    for stage in reversed(degrees.stages_of(rank)):
        for microbatch in reversed(range(degrees.num_microbatches)):
            yield Action("backward", stage, microbatch)


def _forwards(rank: int, degrees: Degrees) -> Iterator[Action]:
    for stage in degrees.stages_of(rank):
        for microbatch in range(degrees.num_microbatches):
            yield Action("forward", stage, microbatch)


GPIPE = Rule("torch.distributed.pipelining:ScheduleGPipe", _order)
LOOPED_BFS = Rule(
    "torch.distributed.pipelining:ScheduleLoopedBFS",
    _reversed_order,
    is_virtual=True,
    reverses=True,
)
