"""Describe what a rank does in a step as spans of time, which are measured or predicted.

GPipe on two stages and two micro-batches:

    rank 0   [forward 0][forward 1][wait gradient ][backward 0][backward 1]           [all-reduce]
    rank 1   [wait input][forward 0][forward 1][backward 0][backward 1]               [all-reduce]
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, get_args

SpanKind = Literal[
    "forward",  # of a micro-batch through a stage; on the last stage it includes the loss
    "backward",
    "wait input",  # waiting for the previous stage
    "wait gradient",  # waiting for the next stage
    "wait end",  # waiting for the slowest rank to finish its backwards
    "send",  # sending features and gradients, as far as this blocks the rank
    "all-reduce",  # adding up the gradients of all replicas
    "optimizer",  # the update of the weights
    "other",  # statistics of norms, clipping, moving averages, and the time between other kinds
]
KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
WAITING: tuple[SpanKind, ...] = ("wait input", "wait gradient", "wait end")
COMPUTE: tuple[SpanKind, ...] = ("forward", "backward")


class Span(NamedTuple):
    """A span of one rank's time; the spans of a rank in a step do not overlap."""

    rank: int
    kind: SpanKind
    # Seconds since the start of the step, on the clock of rank 0.
    start: float
    end: float
    stage: int = -1  # virtual ones counted; -1 if the span is not about one stage
    microbatch: int = -1  # index in the replica; -1 if the span is not about one

    @property
    def seconds(self) -> float:
        return self.end - self.start


def by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Group spans by rank, in the order of their start."""
    ordered = sorted(spans, key=lambda span: (span.rank, span.start, span))
    return {rank: list(own) for rank, own in groupby(ordered, key=lambda span: span.rank)}


def step_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds from the first start to the last end of all ranks."""
    if not spans:
        return 0.0
    return max(span.end for span in spans) - min(span.start for span in spans)
