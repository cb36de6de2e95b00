"""The ranks that share the batch of one replica, and what they send one another."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.parallel.shared_memory import Pool, Segment, Window, this_machine
from vigpipe.parallel.values import all_gather_values

Index = tuple[slice, ...]
Write = Callable[[Sequence[Tensor]], None]
LEAST_WRITTEN_BYTES = 1 << 18  # All ranks of a machine write into tensors of this size and more.


class Contribution(NamedTuple):
    """What a rank has for the tensors that an exchange makes, one for every rank."""

    write: Write  # what this rank has for every rank, into a list of tensors, one for each
    shapes: Sequence[tuple[int, ...]]  # of the tensors of all ranks
    region: Callable[[int, int], Index]  # which entries the first rank writes in that of the second
    like: Tensor  # of their type, on their device


class Shards:
    """The m ranks that share a replica's batch; they call each method together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        # Bytes that this rank has given to others so far, by what they were for. Of a sum, those
        # that an all-reduce sends at least.
        self.sent: Counter[str] = Counter()
        self._pool = Pool()
        self._windows = self._open_windows()
        self.can_write = bool(self._windows)  # into each other's memory, rather than send

    def counts(self, num: int) -> list[int]:
        """Divide a number of rows or channels: the first ranks have one more than the last."""
        return [num // self.size + (rank < num % self.size) for rank in range(self.size)]

    def count(self, num: int) -> int:
        """Return this rank's number of rows or channels, which never falls as that of all grows."""
        return self.counts(num)[self.rank]

    def slices(self, num: int) -> list[slice]:
        """Return the rows or channels of each rank, of so many in all; a rank's are consecutive."""
        return _consecutive(self.counts(num))

    def own(self, num: int) -> slice:
        return self.slices(num)[self.rank]

    def exchange(self, contribution: Contribution, what: str) -> Tensor:
        """Make a tensor for every rank, of which each rank writes some entries; return this rank's.

        The bytes are counted under what they are for, here and below.
        """
        write, shapes, index, like = contribution
        if self.size == 1:
            mine = like.new_empty(shapes[0])
            write([mine[index(0, 0)]])
            return mine
        num_bytes = sum(map(math.prod, shapes)) * like.itemsize
        if self.can_write and num_bytes >= LEAST_WRITTEN_BYTES:
            return self._write(contribution, what)
        return self.begin(contribution, what)()

    def begin(
        self, contribution: Contribution, what: str, out: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Begin an exchange, and return what waits for its end and returns this rank's tensor.

        The ranks send, even if they could write. `out` is the tensor of this rank, if there is one
        already; it keeps what nobody gives.
        """
        (write, shapes, index, like), everybody = contribution, range(self.size)
        given = [_block_shape(shapes[to], index(self.rank, to)) for to in everybody]
        taken = [_block_shape(shapes[self.rank], index(of, self.rank)) for of in everybody]
        sizes = [[math.prod(shape) for shape in blocks] for blocks in (taken, given)]
        parts, received = (like.new_empty(sum(of_blocks)) for of_blocks in reversed(sizes))
        each = zip(parts.split(sizes[1]), given, strict=True)
        write([part.view(shape) for part, shape in each])
        self.sent[what] += (len(parts) - sizes[1][self.rank]) * like.itemsize
        if like.itemsize < 4:  # gloo ends the process for half-precision numbers
            in_bytes = [[like.itemsize * size for size in of_blocks] for of_blocks in sizes]
            ends = received.view(torch.uint8), parts.view(torch.uint8)
            work = dist.all_to_all_single(*ends, *in_bytes, group=self.group, async_op=True)
        else:
            work = dist.all_to_all_single(received, parts, *sizes, group=self.group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            regions = [index(of, self.rank) for of in everybody]
            starts = [region[0].start for region in regions]
            are_rows = all(len(region) == 1 for region in regions)
            if out is None and are_rows and starts == sorted(starts):
                return received.view(shapes[self.rank])
            whole = like.new_empty(shapes[self.rank]) if out is None else out
            for region, part, shape in zip(regions, received.split(sizes[0]), taken, strict=True):
                whole[region] = part.view(shape)
            return whole

        return wait

    def gathered(self, rows: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """Return the rows of all ranks, one after the other: (counts[rank], ...) -> (n, ...)."""
        shape, entries = (sum(counts), *rows.shape[1:]), _consecutive(counts)
        write, shapes = copies_of(lambda to: rows), [shape] * self.size
        return self.exchange(Contribution(write, shapes, lambda of, to: (entries[of],), rows), what)

    def total(self, values: Tensor, what: str) -> Tensor:
        """Return the sum of what all ranks have, of one shape, with the same bits on all."""
        if self.size == 1:
            return values
        total = values.contiguous().clone()
        self.sent[what] += 2 * (self.size - 1) * total.nbytes // self.size
        dist.all_reduce(total, group=self.group)
        return total

    def _write(self, contribution: Contribution, what: str) -> Tensor:
        """Let every rank write into the tensors of all; return this one's."""
        write, shapes, index, like = contribution
        mine, segment = self._pool.empty(shapes[self.rank], like.dtype)
        segments = torch.empty(self.size, 2, dtype=torch.int64)
        dist.all_gather_into_tensor(segments, torch.tensor([segment]), group=self.group)
        theirs = {
            to: window.tensor(Segment(*segments[to].tolist()), shapes[to], like.dtype)
            for to, window in self._windows.items()
        }
        theirs[self.rank] = mine
        blocks = [theirs[to][index(self.rank, to)] for to in range(self.size)]
        write(blocks)
        num_given = sum(block.numel() for block in blocks) - blocks[self.rank].numel()
        self.sent[what] += num_given * like.itemsize
        # Nobody reads before all have written; a barrier of gloo takes longer than this.
        dist.all_reduce(torch.zeros(1), group=self.group)
        return mine

    def _open_windows(self) -> dict[int, Window]:
        """Open the memory of the other ranks; nothing where one of them is elsewhere."""
        if self.size == 1 or dist.get_backend(self.group) != "gloo":
            return {}
        probe, segment = self._pool.empty((1,), torch.int64)
        probe.fill_(os.getpid())
        own = [this_machine(), os.getpid(), list(segment)]
        told = all_gather_values(own, self.size, self.group)
        windows = {rank: Window(told[rank][1]) for rank in range(self.size)}
        del windows[self.rank]
        can_read = len({machine for machine, _, _ in told}) == 1 and all(
            _reads(window, told[rank][1], Segment(*told[rank][2]))
            for rank, window in windows.items()
        )
        everybody = torch.tensor([int(can_read)])
        dist.all_reduce(everybody, dist.ReduceOp.MIN, group=self.group)
        return windows if everybody.item() else {}


def _reads(window: Window, process_id: int, segment: Segment) -> bool:
    """Whether a process's memory can be reached: it has written its id there."""
    try:
        return window.tensor(segment, (1,), torch.int64).item() == process_id
    except OSError:
        return False


def copies_of(source: Callable[[int], Tensor]) -> Write:
    """Return what fills each rank's tensor with a copy of `source(rank)`, which may be a view."""

    def write(blocks: Sequence[Tensor]) -> None:
        for to, block in enumerate(blocks):
            block.copy_(source(to))

    return write


def _consecutive(counts: Sequence[int]) -> list[slice]:
    """Return slices of these lengths, each of which begins where the one before it ends."""
    ends = itertools.accumulate(counts, initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _block_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    lengths = [len(range(*of.indices(n))) for of, n in zip(index, shape, strict=False)]
    return *lengths, *shape[len(lengths) :]
