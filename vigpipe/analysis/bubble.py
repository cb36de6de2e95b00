"""Why ranks wait: the measured bubble, and how it differs from the formula's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from vigpipe.analysis.account import Account
from vigpipe.parallel.layout import Layout
from vigpipe.planning.simulate import StageCosts, simulate
from vigpipe.schedules import orders
from vigpipe.spans import COMPUTE, Kind, Span, step_seconds
from vigpipe.timing.recorder import Step


@dataclass(frozen=True)
class Bubble:
    """The share of a step in which ranks wait for each other, mean over the ranks, and its reasons.

    Attributes:
        measured: waiting for input, for gradients, and for what is sent to leave.
        formula: (S - 1) / (V M + S - 1), of equal stages without transfers.
        fill_and_drain: what equal stages with the mean of the measured times would wait.
        imbalance: what they wait more because stages differ.
        variation: because micro-batches differ.
        transfer: the rest: handing on, and the schedule's own work between micro-batches.
    """

    measured: float
    formula: float
    fill_and_drain: float
    imbalance: float
    variation: float
    transfer: float


def explain_bubble(
    accounts: Sequence[Account], steps: Mapping[int, Sequence[Step]], layout: Layout
) -> Bubble | None:
    """The bubble and its reasons; None where nothing was recorded closely, or there is one stage.

    Every reason is a difference of two simulated schedules, from the simplest to the one that knows
    the measured times of every micro-batch; the seconds are shares of the measured step.

    Args:
        accounts: of all ranks.
        steps: recorded closely, by rank: those from which the reasons are taken.
        layout: the degrees.
    """
    if layout.pipeline_size == 1 or not accounts or not all(steps.get(a.rank) for a in accounts):
        return None
    step = fmean(account.step_seconds for account in accounts)
    chains = [
        _waits(times, layout)
        for replica in range(layout.num_replicas)
        for times in _times(steps, layout, replica)
    ]
    equal, unequal, varying = (fmean(chain[i] for chain in chains) / step for i in range(3))
    measured = fmean(account.waiting for account in accounts) / step
    return Bubble(
        measured=measured,
        formula=ideal_bubble(layout),
        fill_and_drain=equal,
        imbalance=unequal - equal,
        variation=varying - unequal,
        transfer=measured - varying,
    )


def ideal_bubble(layout: Layout) -> float:
    """(S - 1) / (V M + S - 1): V = 1 is GPipe's and 1F1B's; arXiv:2104.04473, section 2.2."""
    stages, pieces = layout.pipeline_size, layout.num_microbatches
    return (stages - 1) / (layout.virtual_stages * pieces + stages - 1)


Times = dict[Kind, list[list[float]]]  # of every stage and micro-batch


def _times(steps: Mapping[int, Sequence[Step]], layout: Layout, replica: int) -> list[Times]:
    """Measured seconds of one replica's forwards and backwards, a step at a time."""
    ranks = [rank for rank in steps if layout.replica_index(rank) == replica]
    num_stages, pieces = layout.num_stages, layout.num_microbatches
    found: list[Times] = []
    for together in zip(*(steps[rank] for rank in ranks), strict=True):
        times: Times = {kind: [[0.0] * pieces for _ in range(num_stages)] for kind in COMPUTE}
        for step in together:
            for span in step.spans:
                if span.kind in COMPUTE:
                    times[span.kind][span.stage][span.microbatch] += span.seconds
        found.append(times)
    return found


def _waits(times: Times, layout: Layout) -> tuple[float, float, float]:
    """Seconds a rank waits in a step: with equal stages, unequal ones, varying micro-batches."""
    every = {kind: fmean(fmean(stage) for stage in times[kind]) for kind in COMPUTE}
    equal: Times = {k: [[every[k]] * len(stage) for stage in times[k]] for k in COMPUTE}
    unequal: Times = {k: [[fmean(stage)] * len(stage) for stage in times[k]] for k in COMPUTE}
    waits = [_wait(predicted_spans(case, layout), layout) for case in (equal, unequal, times)]
    return waits[0], waits[1], waits[2]


def predicted_spans(times: Times, layout: Layout) -> list[Span]:
    """The schedule of one replica with these times, and nothing else that takes any."""
    own = orders(
        layout.schedule, layout.pipeline_size, layout.virtual_stages, layout.num_microbatches
    )
    num_stages = layout.num_stages
    costs = StageCosts(
        forward=times["forward"],
        backward=times["backward"],
        features=[0.0] * (num_stages - 1),
        gradients=[0.0] * (num_stages - 1),
        dispatch=0.0,
        reduce=[0.0] * num_stages,
        update=[0.0] * layout.pipeline_size,
    )
    return simulate(own, costs)


def _wait(spans: Sequence[Span], layout: Layout) -> float:
    busy = sum(span.seconds for span in spans if span.kind in COMPUTE)
    return step_seconds(spans) - busy / layout.pipeline_size


def mean_times(steps: Mapping[int, Sequence[Step]], layout: Layout) -> Times:
    """Measured seconds of every stage's forward and backward, mean over replicas and steps.

    The same for every micro-batch.
    """
    samples = [
        times for replica in range(layout.num_replicas) for times in _times(steps, layout, replica)
    ]
    pieces = layout.num_microbatches
    return {
        kind: [
            [fmean(value for sample in samples for value in sample[kind][stage])] * pieces
            for stage in range(layout.num_stages)
        ]
        for kind in COMPUTE
    }
