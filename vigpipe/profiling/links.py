"""Measure what ranks take to exchange rows, to add tensors up and to agree."""

import time
from collections.abc import Callable
from functools import partial
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

NUM_ROUNDS = 2  # timed rounds of a burst
NUM_WARMUP = 1
EXCHANGES = 1 << 10, 1 << 16, 1 << 20, 1 << 23  # bytes that a rank gives
SUMS = 1 << 3, 1 << 16, 1 << 20, 1 << 23  # bytes of a tensor
_COLUMNS_PER_RANK = 64


class LinkMeter:
    """Measures, in bursts, what ranks that share a graph take to tell one another something.

    Bursts belong between rehearsals, as a machine's speed drifts. Of an exchange, what a rank does
    by itself is taken off, since rehearsals have it.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._transfers: list[tuple[float, float]] = []  # latency and bandwidth, of each burst
        self._rounds: list[list[float]] = []  # seconds of every piece of work
        self._given: list[int] = []  # bytes that a rank gives in each exchange
        # Each exchange is there twice: with the others, then by itself.
        self._exchanges: list[Callable[[], object]] = []
        self._sums: list[Callable[[], object]] = []
        self._small = torch.zeros(8, dtype=torch.float64, device=device)
        if world_size > 1:
            self._prepare()

    def _prepare(self) -> None:
        world_size, device = self._world_size, self._device
        real, alone = Shards(dist.group.WORLD), CountedShards(world_size, self._rank)
        columns = _COLUMNS_PER_RANK * world_size
        for num_bytes in EXCHANGES:
            rows = max(1, num_bytes * world_size // (4 * columns * (world_size - 1)))
            x = torch.zeros(rows, columns, device=device)

            def switch(shards: Shards, x: torch.Tensor = x) -> object:
                return to_columns(x, shards, len(x) * world_size)

            self._given.append(4 * rows * columns * (world_size - 1) // world_size)
            self._exchanges += [partial(switch, real), partial(switch, alone)]
        for num_bytes in SUMS:
            values = torch.zeros(num_bytes // 8, dtype=torch.float64, device=device)
            self._sums.append(partial(dist.all_reduce, values))

    def burst(self) -> None:
        """Measure all of it a few times; all ranks call this together."""
        self._transfers.append(measure_transfer(self._rank, self._world_size, self._device))
        if self._world_size == 1:
            return
        works = [*self._exchanges, *self._sums, self._agree]
        rounds = [_slowest(works, self._device) for _ in range(NUM_WARMUP + NUM_ROUNDS)]
        self._rounds += rounds[NUM_WARMUP:]

    def links(self) -> Links:
        """Return the medians over all bursts, the same on all ranks; one alone has no messages."""
        latency, bandwidth = (median(each) for each in zip(*self._transfers, strict=True))
        if self._world_size == 1:
            return Links(1, ((0, 0.0),), ((0, 0.0),), 0.0, latency, bandwidth)
        *seconds, agreement = (median(each) for each in zip(*self._rounds, strict=True))
        exchanges, sums = seconds[: len(self._exchanges)], seconds[len(self._exchanges) :]
        own = zip(exchanges[::2], exchanges[1::2], strict=True)
        beyond = [max(0.0, together - by_itself) for together, by_itself in own]
        return Links(
            self._world_size,
            tuple(zip(self._given, beyond, strict=True)),
            tuple(zip(SUMS, sums, strict=True)),
            agreement,
            latency,
            bandwidth,
        )

    def _agree(self) -> None:
        gather_vectors(self._small, dist.group.WORLD)
        agree(NOTHING_WANTED, Peers(self._world_size))


def _slowest(works: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the seconds of each piece of work on the slowest rank."""
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
    return slowest.tolist()
