"""Tell steps with full batches, which figures count, from those with partial ones.

An epoch of 1,280 images in batches of 1,000 has a full batch and a partial one of 280; a median
over both would be that of neither.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from vigpipe.timing.recorder import PHASES, Phase, Row

STEPS: dict[Phase, tuple[str, str]] = {  # one, several
    "train": ("training step", "training steps"),
    "test": ("test batch", "test batches"),
}


class PartialBatch(NamedTuple):
    """The steps of a phase with partial batches of one size; seconds are of the slowest rank.

    A batch is made of `samples`, images or sub-graphs, a full one of `full_batch`. Figures count
    them only if no recorded step of the phase has a full batch.
    """

    phase: Phase
    samples: int
    full_batch: int
    seconds: list[float]
    are_counted: bool


def full_batches(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of steps with full batches; of a phase without any, all of its rows."""
    rows = list(rows)
    phases = {row.phase for row in rows if row.is_full}
    return [row for row in rows if row.is_full or row.phase not in phases]


def partial_batches(rows: Iterable[Row]) -> list[PartialBatch]:
    """Return the steps with partial batches, training first, and the largest batches of each."""
    phases: set[Phase] = set()
    slowest: dict[tuple[Phase, int, int], dict[int, float]] = {}
    for row in rows:
        if row.name != "step":
            continue
        if row.is_full:
            phases.add(row.phase)
            continue
        steps = slowest.setdefault((row.phase, row.samples, row.full_batch), {})
        steps[row.step] = max(row.seconds, steps.get(row.step, 0.0))
    ordered = sorted(slowest.items(), key=lambda item: (PHASES.index(item[0][0]), -item[0][1]))
    return [
        PartialBatch(*key, [steps[step] for step in sorted(steps)], key[0] not in phases)
        for key, steps in ordered
    ]


def _in_milliseconds(seconds: Sequence[float]) -> str:
    """Write a median, the least and the most: `median 2.500 ms, 2.000 to 3.000 ms`."""
    middle, least, most = (f"{1e3 * f(seconds):,.3f}" for f in (median, min, max))
    return f"median {middle} ms, {least} to {most} ms" if len(seconds) > 1 else f"{middle} ms"


def partial_sentence(batch: PartialBatch, members: str = "samples") -> str:
    """Say how long the steps with a partial batch took, and whether other figures count them.

    `members` names what batches are made of; see `vigpipe.job.fill.members`.
    """
    number, (one, several) = len(batch.seconds), STEPS[batch.phase]
    others = "other figures leave it out"
    if batch.are_counted:
        others = f"no full {one} was timed, so other figures are of this one"
    return (
        f"Partial batch of {batch.samples:,} of {batch.full_batch:,} {members}: {number} "
        f"{one if number == 1 else several}, {_in_milliseconds(batch.seconds)}; {others}."
    )
