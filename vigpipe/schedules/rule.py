"""What there is to know of a schedule: when it can run, and the order of a rank's actions."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple


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


class Degrees(NamedTuple):
    """The degrees of a pipeline.

    Attributes:
        pipeline_size: S, the ranks.
        virtual_stages: V, the stages that each rank holds.
        num_microbatches: M, the micro-batches of one replica.
    """

    pipeline_size: int
    virtual_stages: int
    num_microbatches: int

    def stages_of(self, rank: int) -> range:
        """Return the indices of a rank's stages."""
        return range(rank, self.pipeline_size * self.virtual_stages, self.pipeline_size)


class Rule(NamedTuple):
    """A schedule.

    Attributes:
        class_name: its class, which is one of torch's or has the same methods, as "module:name".
        order: returns the actions of a rank of at least two in a training step, in their order.
        why_not: says why it cannot run with some degrees, and what to change; None if it can.
        is_virtual: whether a rank may hold several stages.
        reverses: whether the backwards come in the reverse order of the forwards, so that gradients
            are added up in another order than in one process.
    """

    class_name: str
    order: Callable[[int, Degrees], Iterable[Action]]
    why_not: Callable[[Degrees], str | None] = lambda degrees: None
    is_virtual: bool = False
    reverses: bool = False
