"""What there is to know of a schedule: when it can run, and the order of a rank's actions."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """The forward or the backward of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int  # virtual ones counted; stage i runs on pipeline rank i mod S
    microbatch: int  # index in the replica


class Degrees(NamedTuple):
    """The degrees of a pipeline."""

    pipeline_size: int  # S, the ranks
    virtual_stages: int  # V, the stages that each rank holds
    num_microbatches: int  # M, the micro-batches of one replica

    def stages_of(self, rank: int) -> range:
        return range(rank, self.pipeline_size * self.virtual_stages, self.pipeline_size)


class Rule(NamedTuple):
    """A schedule."""

    class_name: str  # one of torch's, or a class with the same methods, as "module:name"
    order: Callable[[int, Degrees], Iterable[Action]]  # the actions of a rank of at least two
    # Says why it cannot run with some degrees, and what to change; None if it can.
    why_not: Callable[[Degrees], str | None] = lambda degrees: None
    is_virtual: bool = False  # a rank may hold several stages
    # The backwards come in the reverse order of the forwards, so that gradients are added up in
    # another order than in one process.
    reverses: bool = False
