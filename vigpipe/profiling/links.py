"""Measure what ranks take to exchange rows, to add tensors up and to agree."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from vigpipe.launch.device import synchronize
from vigpipe.parallel.agreement import NOTHING_WANTED, Peers, agree
from vigpipe.parallel.gradients import gather_vectors
from vigpipe.parallel.shards import Shards
from vigpipe.parallel.switch import to_columns
from vigpipe.planning.ways import Links
from vigpipe.profiling.rehearse import CountedShards
from vigpipe.profiling.transfers import measure_transfer

NUM_ROUNDS = 15  # timed ones
NUM_WARMUP = 3
EXCHANGES = 1 << 10, 1 << 16, 1 << 20, 1 << 23  # bytes that a rank gives
SUMS = 1 << 3, 1 << 16, 1 << 20, 1 << 23  # bytes of a tensor
_COLUMNS = 64  # of each rank


def measure_links(rank: int, world_size: int, device: torch.device) -> Links:
    """Let all ranks exchange what ranks that share a graph do; all of them call this together.

    Of an exchange, what a rank does for it by itself, such as writing what it gives, is taken off:
    a rehearsal has that (`rehearse`).

    Args:
        rank: position in the world.
        world_size: number of ranks.
        device: device of this rank.

    Returns:
        What messages take, the same on all ranks; nothing if there is one.
    """
    latency, bandwidth = measure_transfer(rank, world_size, device)
    if world_size == 1:
        return Links(1, ((0, 0.0),), ((0, 0.0),), 0.0, latency, bandwidth)
    real, alone = Shards(dist.group.WORLD), CountedShards(world_size, rank)
    exchanges: list[tuple[float, float]] = []
    for num_bytes in EXCHANGES:
        columns = _COLUMNS * world_size
        rows = max(1, num_bytes * world_size // (4 * columns * (world_size - 1)))
        x = torch.zeros(rows, columns, device=device)

        def switch(shards: Shards, x: torch.Tensor = x) -> object:
            return to_columns(x, shards, len(x) * world_size)

        together, by_itself = _slowest([lambda: switch(real), lambda: switch(alone)], device)
        given = 4 * rows * columns * (world_size - 1) // world_size
        exchanges.append((given, max(0.0, together - by_itself)))
    sums: list[tuple[float, float]] = []
    for num_bytes in SUMS:
        values = torch.zeros(num_bytes // 8, dtype=torch.float64, device=device)
        (seconds,) = _slowest([lambda v=values: dist.all_reduce(v)], device)
        sums.append((num_bytes, seconds))
    small, peers = torch.zeros(8, dtype=torch.float64, device=device), Peers(world_size)

    def agreed() -> None:
        gather_vectors(small, dist.group.WORLD)
        agree(NOTHING_WANTED, peers)

    (agreement,) = _slowest([agreed], device)
    return Links(world_size, tuple(exchanges), tuple(sums), agreement, latency, bandwidth)


def _slowest(works: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the seconds of each piece of work on the slowest rank, medians over the rounds."""
    found: list[list[float]] = []
    for _ in range(NUM_WARMUP + NUM_ROUNDS):
        own: list[float] = []
        for work in works:
            dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            own.append(time.perf_counter() - start)
        slowest = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.tolist())
    return [median(each) for each in zip(*found[NUM_WARMUP:], strict=True)]
