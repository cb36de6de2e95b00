"""Read the batches of a run, as one rank needs them."""

from collections.abc import Iterator
from typing import NamedTuple

from vigpipe.data.batches import ReplicaBatch, epoch_order, repeated, replica_batches
from vigpipe.launch.device import uses_pinned_memory
from vigpipe.run.rank import RankState


class NextBatch(NamedTuple):
    """The batch of one step.

    Attributes:
        epoch: number of the epoch, counted from 1.
        batch: this replica's share of the batch.
        is_evaluation_due: whether the test images must be scored after the step.
    """

    epoch: int
    batch: ReplicaBatch
    is_evaluation_due: bool


def batches(rank_state: RankState) -> Iterator[NextBatch]:
    """Read this rank's share of every step that is left.

    What a step reads depends only on its number, so a resumed run continues exactly where it ended.

    Args:
        rank_state: this rank's state; the first step to read is `rank_state.step`, counted from 0.

    Yields:
        One batch for each step until the end of the run.
    """
    run = rank_state.run
    config = run.config
    step = rank_state.step
    while step < run.num_steps:
        epoch, num_skipped = step // run.steps_per_epoch + 1, step % run.steps_per_epoch
        order, copies = epoch_order(config.seed, epoch, len(run.source.train)), None
        if (config.repeated_augment or 1) > 1:
            order, copies = repeated(order, run.batch_size, config.repeated_augment or 1)
        order = order[: (run.num_steps - step + num_skipped) * run.batch_size]
        num_read = (
            num_skipped * run.batch_size
        )  # number of images of this epoch that earlier steps have read
        for batch in replica_batches(
            run.source.train,
            order[num_read:],
            run.share(rank_state.replica_index),
            copies=None if copies is None else copies[num_read:],
            mix=rank_state.mix,
            reader=rank_state.reader,
            seed=config.seed,
            first_step=step,
            epoch=epoch,
            with_images=rank_state.pipeline.has_first,
            with_labels=rank_state.pipeline.has_last,
            dtype=run.dtype,
            pin=uses_pinned_memory(rank_state.device),
        ):
            step, num_read = step + 1, num_read + batch.num_samples
            is_last = num_read == len(order)
            is_due = epoch % config.evaluate_every == 0 or step == run.num_steps
            yield NextBatch(epoch, batch, is_last and is_due)
