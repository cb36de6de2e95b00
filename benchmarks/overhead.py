"""Compare the measured steps of emulated layouts with their ideal ones, and fit the overhead."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan
from vigpipe.planning.profile import Profile
from vigpipe.planning.step import pieces_of

SHORT_OF_CORES = 0.5  # share of busy cores above which a row is marked


@dataclass(frozen=True)
class Case:
    """An emulated layout, with the seconds that its stages sleep."""

    layout: Layout  # degrees of parallelism and the schedule
    plan: Plan  # the cut into stages
    microbatch_size: int  # samples in a micro-batch
    forward: tuple[float, ...]  # seconds that every stage sleeps for the forward of a micro-batch
    backward: tuple[float, ...]  # seconds that every stage sleeps for the backward of a micro-batch
    # Bytes of a micro-batch at the largest boundary between two stages; 0 for one stage.
    transfer_bytes: int

    @property
    def ideal_seconds(self) -> float:
        """Seconds of a step whose transfers and all-reduce take no time; exact for GPipe."""
        waves = (self.layout.num_microbatches - 1) * (max(self.forward) + max(self.backward))
        return waves + sum(self.forward) + sum(self.backward)

    @property
    def compute_seconds(self) -> float:
        """Seconds that all stages of a replica together sleep in a step."""
        return self.layout.num_microbatches * (sum(self.forward) + sum(self.backward))

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits, if all stages are equal."""
        return (self.layout.pipeline_size - 1) / self.waves

    @property
    def waves(self) -> int:
        """Number of micro-batches on the critical path, with a forward and a backward each."""
        return self.layout.num_microbatches + self.layout.pipeline_size - 1

    @property
    def transfers(self) -> int:
        """Number of transfers on the critical path."""
        return 2 * (self.layout.pipeline_size - 1)

    @property
    def shortest_sleep(self) -> float:
        """Seconds of the shortest forward or backward."""
        return min(*self.forward, *self.backward)


def make_case(
    layout: Layout, plan: Plan, profile: Profile, microbatch_size: int, scale: float
) -> Case:
    """Add up the costs of the stages of a plan, times `scale`, as `SleepingModel` does."""

    def cost(values: Callable[..., Sequence[float]]) -> tuple[float, ...]:
        return tuple(
            scale
            * sum(
                profile.at(values(piece), microbatch_size) for piece in pieces_of(profile, blocks)
            )
            for blocks in plan.stages
        )

    senders = [profile.blocks[blocks[-1]] for blocks in plan.stages[:-1]]
    boundary = max(
        (profile.at(sender.boundary_bytes, microbatch_size) for sender in senders), default=0
    )
    forward, backward = cost(lambda piece: piece.forward), cost(lambda piece: piece.backward)
    return Case(layout, plan, microbatch_size, forward, backward, round(boundary))


@dataclass(frozen=True)
class TimedStep:
    """A timed step of an emulated layout; the seconds are those of the slowest rank."""

    case: Case
    repeat: int  # index of the step among those of its layout
    seconds: float  # seconds of the schedule and of adding up gradients
    schedule_seconds: float  # seconds of the schedule alone
    sync_seconds: float  # seconds of adding up gradients, waiting for other replicas included
    late_seconds: float  # seconds by which a sleep ended late, the mean over all sleeps
    cpu_seconds: float  # processor seconds of all ranks together
    sync_bytes: int  # bytes of the buffer that a rank adds up
    # Resident memory of all ranks together after the step; a shared page counts once.
    memory_bytes: int


@dataclass(frozen=True)
class MeasuredLayout:
    """The timed steps of one emulated layout."""

    case: Case
    steps: tuple[TimedStep, ...]

    def median(self, name: str) -> float:
        """Return the median of an attribute of the steps."""
        return median(getattr(step, name) for step in self.steps)

    def fastest(self, name: str) -> float:
        """Return the least value of an attribute of the steps."""
        return min(getattr(step, name) for step in self.steps)

    @property
    def ratio(self) -> float:
        """Ratio of the measured step to the ideal one."""
        return self.median("seconds") / self.case.ideal_seconds

    @property
    def bubble(self) -> float:
        """Share of the schedule's time in which a stage does not sleep."""
        total = self.case.layout.pipeline_size * self.median("schedule_seconds")
        return 1 - self.case.compute_seconds / total

    @property
    def busy_cores(self) -> float:
        """Average number of cores at work during the step."""
        return median(step.cpu_seconds / step.seconds for step in self.steps)

    @property
    def is_short_of_cores(self) -> bool:
        """Whether ranks may have waited for a core, and not for one another."""
        return self.busy_cores > SHORT_OF_CORES * (os.cpu_count() or 1)


def by_case(steps: Sequence[TimedStep]) -> list[MeasuredLayout]:
    """Group steps by layout, in the order of the first step of each layout."""
    cases: dict[Case, list[TimedStep]] = {}
    for step in steps:
        cases.setdefault(step.case, []).append(step)
    return [MeasuredLayout(case, tuple(same)) for case, same in cases.items()]


@dataclass(frozen=True)
class Overhead:
    """The overhead of a step over its ideal, as a × micro-batches + b × transfers on its path."""

    # The overhead a of a forward and a backward: schedule, autograd, and waking up late.
    microbatch_seconds: float
    transfer_seconds: float  # b, the overhead of a transfer
    microbatch_error: float  # standard error of a, in seconds
    transfer_error: float  # standard error of b, in seconds
    residual_seconds: float  # root mean square of the overhead that the fit does not explain
    largest_seconds: float  # largest overhead that was to be explained
    num_layouts: int  # number of layouts in the fit
    most_ranks: int  # of one of them


def select_layouts(measured: Sequence[MeasuredLayout]) -> list[MeasuredLayout]:
    """Select the layouts for `fit_overhead`: those with several stages and the fewest replicas.

    Layouts of one stage are left out because they run without torch's schedule; if the others are
    enough, also those with more ranks than this host has cores, which wait for one another's.
    """
    fewest = min(m.case.layout.num_replicas for m in measured)
    chosen = [
        m
        for m in measured
        if m.case.layout.pipeline_size > 1 and m.case.layout.num_replicas == fewest
    ]
    cores = os.cpu_count() or 1
    alone = [m for m in chosen if m.case.layout.world_size <= cores]
    return alone if _tell_apart(_counts(alone)) else chosen


def _counts(measured: Sequence[MeasuredLayout]) -> NDArray[np.float64]:
    """Return the micro-batches and transfers on the critical path of each layout, (n, 2)."""
    return np.array([(m.case.waves, m.case.transfers) for m in measured], float).reshape(-1, 2)


def _tell_apart(counts: NDArray[np.float64]) -> bool:
    return len(counts) >= 3 and np.linalg.matrix_rank(counts) == 2


def fit_overhead(measured: Sequence[MeasuredLayout]) -> Overhead | None:
    """Fit the overhead by least squares over the fastest repeat of every layout.

    The fastest repeats are taken because other processes on the host can only add to them.

    Returns:
        The overhead, or None for fewer than three layouts, or if micro-batches and transfers are in
        the same proportion in all of them.
    """
    chosen = select_layouts(measured)
    counts = _counts(chosen)
    if not _tell_apart(counts):
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
        most_ranks=max(m.case.layout.world_size for m in chosen),
    )
