"""What a rank does in a step, as stretches of time: measured by `timing`, predicted by `planning`.

GPipe on two stages and two micro-batches:

    rank 0   [forward 0][forward 1][wait gradient ][backward 0][backward 1]           [all-reduce]
    rank 1   [wait input][forward 0][forward 1][backward 0][backward 1]               [all-reduce]
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "forward",  # a micro-batch through a stage; the loss belongs to the last stage's
    "backward",
    "wait input",  # for the stage before
    "wait gradient",  # for the stage behind
    "wait end",  # for the slowest rank to come to the end of its backwards
    "send",  # handing on features and gradients, where that holds the rank up
    "all-reduce",  # adding gradients up over the replicas
    "optimizer",  # the update of the weights
    "other",  # statistics of the norms, clipping, moving averages, what is between the others
]
KINDS: tuple[Kind, ...] = get_args(Kind)
WAITING: tuple[Kind, ...] = ("wait input", "wait gradient", "wait end")
COMPUTE: tuple[Kind, ...] = ("forward", "backward")


class Span(NamedTuple):
    """A stretch of one rank's time; those of a rank and a step do not overlap.

    Attributes:
        rank: position in the world.
        kind: what the rank did.
        start: seconds since the step began, on the clock of rank 0.
        end: likewise.
        stage: number in the plan, virtual ones counted; -1 where it is about no single one.
        microbatch: of the replica's; -1 where it is about no single one.
    """

    rank: int
    kind: Kind
    start: float
    end: float
    stage: int = -1
    microbatch: int = -1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Each rank's spans in the order of time."""
    ranks: dict[int, list[Span]] = {}
    for span in sorted(spans):
        ranks.setdefault(span.rank, []).append(span)
    return {rank: sorted(own, key=lambda span: span.start) for rank, own in ranks.items()}


def step_seconds(spans: Sequence[Span]) -> float:
    """From the first start to the last end over all ranks: a step lasts as its slowest rank."""
    if not spans:
        return 0.0
    return max(span.end for span in spans) - min(span.start for span in spans)


def seconds_by_kind(spans: Iterable[Span]) -> dict[Kind, float]:
    """Total of every kind, kinds that do not occur included."""
    totals: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        totals[span.kind] += span.seconds
    return totals
