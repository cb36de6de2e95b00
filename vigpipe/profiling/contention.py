"""Measure how ranks on one host slow each other down when they train at the same time."""

import time
from statistics import median

import torch
import torch.distributed as dist

from vigpipe.launch.device import synchronize
from vigpipe.profiling.trial import Trial
from vigpipe.run.step import train_step

NUM_STEPS = 4  # of every rank in one round
NUM_ROUNDS = 3  # each runs 1, 2, ... ranks in turn


def measure_slowdown(trial: Trial, rank: int, world_size: int) -> tuple[float, ...]:
    """Measure how many times longer a step takes while 1, 2, ... ranks train at the same time.

    All ranks call this together.

    Args:
        trial: the training step that this rank runs.
        rank: position in the world.
        world_size: number of ranks.

    Returns:
        A factor for each number of ranks from 1 to `world_size`; none is below 1.
    """
    rank_state, batch = trial

    def step_seconds(num_ranks: int) -> float:
        """Return the seconds of a step, the mean over the first `num_ranks` ranks."""
        if world_size > 1:
            dist.barrier()
        own_seconds = 0.0
        if rank < num_ranks:
            seconds: list[float] = []
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                train_step(rank_state, batch)
                synchronize(rank_state.device)
                seconds.append(time.perf_counter() - start)
            own_seconds = median(seconds)
        total = torch.tensor([own_seconds], dtype=torch.float64, device=rank_state.device)
        if world_size > 1:
            dist.all_reduce(total)
        return float(total) / num_ranks

    if world_size == 1:
        return (1.0,)
    counts = range(1, world_size + 1)
    rounds = [[step_seconds(n) for n in counts] for _ in range(1 + NUM_ROUNDS)][1:]
    factors = [median(seconds[n - 1] / seconds[0] for seconds in rounds) for n in counts]
    return tuple(max(1.0, factor) for factor in factors)
