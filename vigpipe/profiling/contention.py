"""Measure how ranks on one host slow each other down when they train at the same time."""

import time
from math import ceil
from statistics import median

import torch
import torch.distributed as dist

from vigpipe.launch.device import synchronize
from vigpipe.profiling.trial import Trial
from vigpipe.run.step import train_step

NUM_STEPS = 2  # steps of every rank in one round, for each number of ranks
NUM_ROUNDS = 10  # least rounds, spread over the time that the profile takes


class Contention:
    """Measures a step while 1, 2, ... ranks train at the same time; all ranks call this together.

    The rounds are spread over the calls of `measure`: a quiet moment says little about an hour.
    """

    def __init__(self, trial: Trial, rank: int, world_size: int, num_times: int) -> None:
        self._trial, self._rank, self._world_size = trial, rank, world_size
        self._num_rounds = ceil(NUM_ROUNDS / num_times)
        self._seconds: list[list[float]] = []  # [round][number of ranks - 1]
        self._round()  # the first steps are slower

    def measure(self) -> None:
        """Run this time's share of the rounds."""
        self._seconds += [self._round() for _ in range(self._num_rounds)]

    @property
    def slowdown(self) -> tuple[float, ...]:
        """How many times longer a step takes for each number of ranks, at least 1; the median."""
        rounds = [[s / of_round[0] for s in of_round] for of_round in self._seconds]
        by_count = zip(*rounds, strict=True)
        return tuple(max(1.0, median(factors)) for factors in by_count)

    @property
    def rounds(self) -> tuple[tuple[float, ...], ...]:
        """The same for every round, relative to the median step of one rank alone."""
        alone = median(of_round[0] for of_round in self._seconds)
        return tuple(tuple(s / alone for s in of_round) for of_round in self._seconds)

    def _round(self) -> list[float]:
        """Return the seconds of a step of 1, 2, ... ranks, one number of ranks after the other."""
        return [self._step_seconds(n) for n in range(1, self._world_size + 1)]

    def _step_seconds(self, num_ranks: int) -> float:
        """Return the seconds of a step, the mean over the first `num_ranks` ranks."""
        rank_state, batch = self._trial
        if self._world_size > 1:
            dist.barrier()
        own_seconds = 0.0
        if self._rank < num_ranks:
            start = time.perf_counter()
            for _ in range(NUM_STEPS):
                train_step(rank_state, batch)
            synchronize(rank_state.device)
            own_seconds = (time.perf_counter() - start) / NUM_STEPS
        total = torch.tensor([own_seconds], dtype=torch.float64, device=rank_state.device)
        if self._world_size > 1:
            dist.all_reduce(total)
        return float(total) / num_ranks
