"""Steps of a run that are taken one at a time, without end, to be timed."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vigpipe.job.batch import ReplicaBatch
from vigpipe.parallel.shards import Shards
from vigpipe.replication.strategy import Strategy
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import complete_step, train_step

_MOST_STEPS = 10**6  # of the run, whose end must not come


class Steps:
    """One rank's share of the steps of a run.

    Args:
        run: the run; how many steps it has does not count.
        rank: the rank whose share it is.
        device: where it computes.
        strategy: that of a rank without peers; by default the run's own.
        shards: what stands for the ranks that share its batch, for a rank without peers.

    Attributes:
        state: of the rank.
        batches: of the steps that follow.
    """

    def __init__(
        self,
        run: Run,
        rank: int,
        device: torch.device,
        strategy: Strategy | None = None,
        shards: Shards | None = None,
    ) -> None:
        run = replace(run, config=replace(run.config, steps=_MOST_STEPS))
        self.state = make_rank_state(run, rank, device, strategy=strategy, shards=shards)
        self.batches: Iterator[ReplicaBatch] = batches(self.state)

    def take(self) -> None:
        """Take a step."""
        train_step(self.state, next(self.batches))
        complete_step(self.state)

    def close(self) -> None:
        """End what reads ahead."""
        self.state.feed.close()
