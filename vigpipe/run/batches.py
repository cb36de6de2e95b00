"""Read the batches of a run, as one rank needs them."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from vigpipe.data.batches import ReplicaBatch
from vigpipe.run.rank import RankState


class NextBatch(NamedTuple):
    """The batch of one step.

    Attributes:
        epoch: number of the epoch, counted from 1.
        batch: this replica's share of the batch.
        is_evaluation_due: whether the model must be scored after the step.
    """

    epoch: int
    batch: ReplicaBatch
    is_evaluation_due: bool


def batches(rank_state: RankState) -> Iterator[NextBatch]:
    """Read this rank's share of every step that is left.

    What a step reads depends only on its number, so a resumed run continues exactly where it ended.

    Args:
        rank_state: this rank's state; the first step to read is `rank_state.step`, counted from 0.
            It is told how long each batch took.

    Yields:
        One batch for each step until the end of the run.
    """
    run = rank_state.run
    for step in range(rank_state.step, run.num_steps):
        evaluation = run.next_evaluation(step)  # workers read test images then
        began = time.perf_counter()
        batch = rank_state.job.batch(step, ahead_to=evaluation)
        rank_state.data_seconds = time.perf_counter() - began
        yield NextBatch(step // run.steps_per_epoch + 1, batch, step + 1 == evaluation)
