"""An emulated layout, its ideal step and its measured ones, and the overhead between the two."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan
from vigpipe.planning.profile import Profile
from vigpipe.planning.step import pieces_of

SHORT_OF_CORES = 0.5  # share of the cores at work from which a row is marked


@dataclass(frozen=True)
class Case:
    """A layout with what its stages sleep.

    Attributes:
        layout: the degrees.
        plan: the cut.
        microbatch_size: samples of a micro-batch.
        forward: seconds of every stage on a micro-batch.
        backward: likewise.
        transfer_bytes: the largest boundary between two stages, for a micro-batch; 0 for one stage.
    """

    layout: Layout
    plan: Plan
    microbatch_size: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer_bytes: int

    @property
    def ideal_seconds(self) -> float:
        """Of a step whose transfers and all-reduce take no time: exact for GPipe."""
        waves = (self.layout.num_microbatches - 1) * (max(self.forward) + max(self.backward))
        return waves + sum(self.forward) + sum(self.backward)

    @property
    def compute_seconds(self) -> float:
        """What all stages of a replica sleep in a step, added up."""
        return self.layout.num_microbatches * (sum(self.forward) + sum(self.backward))

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits, for equal stages."""
        return (self.layout.pipeline_size - 1) / self.waves

    @property
    def waves(self) -> int:
        """Micro-batches on the critical path, a forward and a backward each."""
        return self.layout.num_microbatches + self.layout.pipeline_size - 1

    @property
    def transfers(self) -> int:
        """Transfers on the critical path."""
        return 2 * (self.layout.pipeline_size - 1)

    @property
    def shortest_sleep(self) -> float:
        """Seconds of the shortest forward or backward."""
        return min(*self.forward, *self.backward)


def make_case(
    layout: Layout, plan: Plan, profile: Profile, microbatch_size: int, scale: float
) -> Case:
    """Add up what the stages of a plan cost, as `SleepingModel` does."""

    def cost(values: Callable[..., Sequence[float]]) -> tuple[float, ...]:
        return tuple(
            scale
            * sum(
                profile.at(values(piece), microbatch_size) for piece in pieces_of(profile, blocks)
            )
            for blocks in plan.stages
        )

    givers = [profile.blocks[blocks[-1]] for blocks in plan.stages[:-1]]
    boundary = max(
        (profile.at(giver.boundary_bytes, microbatch_size) for giver in givers), default=0
    )
    forward, backward = cost(lambda piece: piece.forward), cost(lambda piece: piece.backward)
    return Case(layout, plan, microbatch_size, forward, backward, round(boundary))


@dataclass(frozen=True)
class Step:
    """A timed step; where ranks differ, the slowest one counts.

    Attributes:
        case: the layout.
        repeat: which of its steps, from 0.
        seconds: of schedule and adding gradients up.
        schedule_seconds: of the schedule alone.
        sync_seconds: of adding gradients up alone, waiting for other replicas included.
        late_seconds: past its end that a sleep took to wake up, the mean over all.
        cpu_seconds: of all ranks together.
        sync_bytes: of the buffer that a rank adds up.
        memory_bytes: resident, of all ranks together after the step; shared pages count once.
    """

    case: Case
    repeat: int
    seconds: float
    schedule_seconds: float
    sync_seconds: float
    late_seconds: float
    cpu_seconds: float
    sync_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class MeasuredLayout:
    """The steps of one layout."""

    case: Case
    steps: tuple[Step, ...]

    def median(self, name: str) -> float:
        """Of an attribute of the steps."""
        return median(getattr(step, name) for step in self.steps)

    def fastest(self, name: str) -> float:
        """Least value of an attribute of the steps."""
        return min(getattr(step, name) for step in self.steps)

    @property
    def ratio(self) -> float:
        """Measured step to ideal one."""
        return self.median("seconds") / self.case.ideal_seconds

    @property
    def bubble(self) -> float:
        """Share of the schedule's time in which a stage does not sleep."""
        total = self.case.layout.pipeline_size * self.median("schedule_seconds")
        return 1 - self.case.compute_seconds / total

    @property
    def busy_cores(self) -> float:
        """Cores at work during the step, on average."""
        return median(step.cpu_seconds / step.seconds for step in self.steps)

    @property
    def is_short_of_cores(self) -> bool:
        """Whether ranks may have waited for a core and not for one another."""
        return self.busy_cores > SHORT_OF_CORES * (os.cpu_count() or 1)


def by_case(steps: Sequence[Step]) -> list[MeasuredLayout]:
    """Put the steps of a layout together, layouts in the order of their first step."""
    cases: dict[Case, list[Step]] = {}
    for step in steps:
        cases.setdefault(step.case, []).append(step)
    return [MeasuredLayout(case, tuple(own)) for case, own in cases.items()]


@dataclass(frozen=True)
class Overhead:
    """What a step takes beyond its ideal, as a x micro-batches + b x transfers on its path.

    Attributes:
        microbatch_seconds: a, for a forward and a backward: schedule, autograd, waking up.
        transfer_seconds: b.
        microbatch_error: standard error of a.
        transfer_error: likewise of b.
        residual_seconds: root mean square of what the fit does not explain.
        largest_seconds: of what was to be explained.
        num_layouts: that were fitted.
    """

    microbatch_seconds: float
    transfer_seconds: float
    microbatch_error: float
    transfer_error: float
    residual_seconds: float
    largest_seconds: float
    num_layouts: int


def select_layouts(measured: Sequence[MeasuredLayout]) -> list[MeasuredLayout]:
    """The layouts that `fit_overhead` looks at: several stages and the fewest replicas.

    One stage is left out because it runs without torch's schedule.
    """
    fewest = min(m.case.layout.num_replicas for m in measured)
    return [
        m
        for m in measured
        if m.case.layout.pipeline_size > 1 and m.case.layout.num_replicas == fewest
    ]


def fit_overhead(measured: Sequence[MeasuredLayout]) -> Overhead | None:
    """Least squares on the fastest repeats: other processes on the host can only add to them.

    Returns:
        None for fewer than three layouts, or if a transfer comes with as many micro-batches in
        all of them.
    """
    chosen = select_layouts(measured)
    counts = np.array([(m.case.waves, m.case.transfers) for m in chosen], float).reshape(-1, 2)
    if len(chosen) < 3 or np.linalg.matrix_rank(counts) < 2:
        return None
    excess = np.array([m.fastest("schedule_seconds") - m.case.ideal_seconds for m in chosen])
    solution, *_ = np.linalg.lstsq(counts, excess, rcond=None)
    residuals = excess - counts @ solution
    variance = residuals @ residuals / (len(chosen) - 2)
    errors = np.sqrt(variance * np.diag(np.linalg.inv(counts.T @ counts)))
    return Overhead(
        *map(float, solution),
        *map(float, errors),
        residual_seconds=float(np.sqrt(np.mean(residuals**2))),
        largest_seconds=float(excess.max()),
        num_layouts=len(chosen),
    )
