"""Explain why ranks wait: the measured bubble, and how it differs from the formula's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from vigpipe.analysis.account import Account
from vigpipe.parallel.layout import Layout
from vigpipe.planning.simulate import StageCosts, simulate
from vigpipe.schedules import orders
from vigpipe.spans import COMPUTE, Span, SpanKind, step_seconds
from vigpipe.timing.recorder import RecordedStep


@dataclass(frozen=True)
class Bubble:
    """Shares of a step in which ranks wait for each other, means over the ranks, by reason."""

    measured: float  # waiting for input, for gradients, and for sent tensors to leave
    formula: float  # `ideal_bubble`
    fill_and_drain: float  # what equal stages with the mean of the measured times would wait
    imbalance: float  # in addition, because stages differ
    variation: float  # in addition, because micro-batches differ
    transfer: float  # the rest: transfers, and the schedule's own work between micro-batches


def explain_bubble(
    accounts: Sequence[Account], steps: Mapping[int, Sequence[RecordedStep]], layout: Layout
) -> Bubble | None:
    """Explain the bubble by simulating the measured steps; None with one stage or without steps."""
    if layout.pipeline_size == 1 or not accounts or not all(steps.get(a.rank) for a in accounts):
        return None
    step = fmean(account.step_seconds for account in accounts)
    chains = [_waits(times, layout) for times in _times(steps, layout)]
    equal, unequal, varying = (fmean(waits) / step for waits in zip(*chains, strict=True))
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
    """Compute the bubble of equal stages, arXiv:2104.04473, section 2.2; V = 1 for GPipe, 1F1B."""
    size, num_microbatches = layout.pipeline_size, layout.num_microbatches
    return (size - 1) / (layout.virtual_stages * num_microbatches + size - 1)


Times = dict[SpanKind, list[list[float]]]  # seconds by kind, stage and micro-batch


def _times(steps: Mapping[int, Sequence[RecordedStep]], layout: Layout) -> list[Times]:
    """Return the measured seconds of forwards and backwards, of each replica in each step."""
    num_stages, num_microbatches = layout.num_stages, layout.num_microbatches
    measured: list[Times] = []
    for replica in range(layout.num_replicas):
        own = [of_rank for rank, of_rank in steps.items() if layout.replica_index(rank) == replica]
        for same_step in zip(*own, strict=True):
            times: Times = {
                kind: [[0.0] * num_microbatches for _ in range(num_stages)] for kind in COMPUTE
            }
            for span in (span for step in same_step for span in step.spans):
                if span.kind in COMPUTE:
                    times[span.kind][span.stage][span.microbatch] += span.seconds
            measured.append(times)
    return measured


def _waits(times: Times, layout: Layout) -> list[float]:
    """Simulate how long a rank waits in a step: with equal stages, unequal ones, measured times."""
    mean = {kind: fmean(fmean(stage) for stage in times[kind]) for kind in COMPUTE}
    equal: Times = {k: [[mean[k]] * len(stage) for stage in times[k]] for k in COMPUTE}
    unequal: Times = {k: [[fmean(stage)] * len(stage) for stage in times[k]] for k in COMPUTE}
    return [_wait(predicted_spans(case, layout), layout) for case in (equal, unequal, times)]


def predicted_spans(times: Times, layout: Layout) -> list[Span]:
    """Simulate the schedule of one replica in which only forwards and backwards take time."""
    actions = orders(
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
    return simulate(actions, costs)


def _wait(spans: Sequence[Span], layout: Layout) -> float:
    busy = sum(span.seconds for span in spans if span.kind in COMPUTE)
    return step_seconds(spans) - busy / layout.pipeline_size


def mean_times(steps: Mapping[int, Sequence[RecordedStep]], layout: Layout) -> Times:
    """Average every stage's measured forward and backward over replicas, steps, micro-batches."""
    samples = _times(steps, layout)
    return {
        kind: [
            [fmean(value for sample in samples for value in sample[kind][stage])]
            * layout.num_microbatches
            for stage in range(layout.num_stages)
        ]
        for kind in COMPUTE
    }
