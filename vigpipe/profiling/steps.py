"""Steps of a run that are taken one at a time, without end, to be timed."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.shards import Shards
from vigpipe.replication.strategy import Strategy
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import complete_step, train_step

_MOST_STEPS = 10**6  # more than are ever taken: the run's end must not come


class Steps:
    """The steps of a run on one rank (`make_rank_state`); how many the run has does not count."""

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
        train_step(self.state, next(self.batches))
        complete_step(self.state)

    def close(self) -> None:
        self.state.feed.close()
