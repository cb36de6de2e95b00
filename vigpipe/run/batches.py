"""Read the batches of a run, as one rank needs them."""

import time
from collections.abc import Iterator
from dataclasses import replace

from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.replication.strategy import Item, Loop
from vigpipe.run.rank import RankState


def read_batch(rank_state: RankState, item: Item) -> ReplicaBatch:
    """Read the batch of the item that this rank is to take a step with; note how long it took."""
    began, run, feed = time.perf_counter(), rank_state.run, rank_state.feed
    if run.has_subnetworks:  # each takes all the data in an order of its own
        number, *ahead = (run.in_batches(i)[1] for i in (item.number, *item.ahead))
        batch = replace(feed.batch(number, ahead), step=item.number // run.num_subnetworks)
    else:
        batch = feed.batch(item.number, item.ahead)
    rank_state.data_seconds = time.perf_counter() - began
    return batch


def batches(rank_state: RankState) -> Iterator[ReplicaBatch]:
    """Yield this rank's batch of every step that is left, and leave out what else is due."""
    for item in rank_state.strategy.items(rank_state.step, is_evaluated=True, loop=Loop()):
        yield read_batch(rank_state, item)
