"""Measure what a message between two neighbouring ranks costs: latency and bandwidth."""

import time
from statistics import median

import torch
import torch.distributed as dist

from vigpipe.launch.device import synchronize

NUM_EXCHANGES = 20
LARGE_BYTES = 1 << 22  # message that is timed for the bandwidth


def measure_transfer(rank: int, world_size: int, device: torch.device) -> tuple[float, float]:
    """Return seconds of latency and bytes a second between ranks 0 and 1; all ranks call this."""
    if world_size == 1:
        return 0.0, 1e12  # there is no neighbour: transfers are as good as free

    def one_way(num_bytes: int) -> float:
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        seconds: list[float] = []
        for _ in range(NUM_EXCHANGES):
            start = time.perf_counter()
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
                dist.send(message, 0)
            synchronize(device)
            seconds.append((time.perf_counter() - start) / 2)
        return median(seconds)

    small, large = one_way(8), one_way(LARGE_BYTES)
    costs = torch.tensor([small, LARGE_BYTES / large], dtype=torch.float64, device=device)
    dist.broadcast(costs, 0)
    return float(costs[0]), float(costs[1])
