"""Tell steps with full batches, which figures count, from those with partial ones.

An epoch of 1,280 images in batches of 1,000 has a full batch and a partial one of 280; a median
over both would be that of neither.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from vigpipe.timing.recorder import PHASES, Phase, Row

K = TypeVar("K")

STEPS: dict[Phase, tuple[str, str]] = {  # one, several
    "train": ("training step", "training steps"),
    "test": ("test batch", "test batches"),
}


class PartialBatch(NamedTuple):
    """The steps of a phase with partial batches of one size; seconds are of the slowest rank."""

    phase: Phase
    samples: int  # images or sub-graphs
    full_batch: int  # samples of a full batch
    seconds: list[float]
    are_counted: bool  # in figures: only if no recorded step of the phase has a full batch


def full_batches(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of steps with full batches; of a phase without any, all of its rows."""
    rows = list(rows)
    phases = {row.phase for row in rows if row.is_full}
    return [row for row in rows if row.is_full or row.phase not in phases]


def step_by_step(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[float]]:
    """Return the seconds of rows with the same key: for every step, those of the slowest rank."""
    most: dict[K, dict[int, float]] = defaultdict(dict)
    for row in rows:
        steps = most[key(row)]
        steps[row.step] = max(row.seconds, steps.get(row.step, 0.0))
    return {key: [steps[step] for step in sorted(steps)] for key, steps in most.items()}


def partial_batches(rows: Iterable[Row]) -> list[PartialBatch]:
    """Return the steps with partial batches, training first, and the largest batches of each."""
    steps = [row for row in rows if row.name == "step"]
    phases = {row.phase for row in steps if row.is_full}
    partial = (row for row in steps if not row.is_full)
    slowest = step_by_step(partial, lambda row: (row.phase, row.samples, row.full_batch))
    ordered = sorted(slowest.items(), key=lambda item: (PHASES.index(item[0][0]), -item[0][1]))
    return [PartialBatch(*key, seconds, key[0] not in phases) for key, seconds in ordered]


def _in_milliseconds(seconds: Sequence[float]) -> str:
    """Write a median, the least and the most: `median 2.500 ms, 2.000 to 3.000 ms`."""
    middle, least, most = (f"{1e3 * f(seconds):,.3f}" for f in (median, min, max))
    return f"median {middle} ms, {least} to {most} ms" if len(seconds) > 1 else f"{middle} ms"


def partial_sentence(batch: PartialBatch, members: str = "samples") -> str:
    """Say how long the steps with a partial batch took, and whether other figures count them.

    `members` names what batches are made of; see `vigpipe.job.rows.members`.
    """
    number, (one, several) = len(batch.seconds), STEPS[batch.phase]
    others = "other figures leave it out"
    if batch.are_counted:
        others = f"no full {one} was timed, so other figures are of this one"
    return (
        f"Partial batch of {batch.samples:,} of {batch.full_batch:,} {members}: {number} "
        f"{one if number == 1 else several}, {_in_milliseconds(batch.seconds)}; {others}."
    )
