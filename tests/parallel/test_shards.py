"""What ranks that share a batch give one another, through memory and through sockets."""

import gc
import itertools
import os

import pytest
import torch
import torch.distributed as dist

from tests.world import run_ranks
from vigpipe.parallel import shards as module
from vigpipe.parallel.shards import Contribution, Shards, copies_of
from vigpipe.parallel.shared_memory import Pool, Window

NUM_ROWS = 7  # not divisible by 3
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def test_rows_and_channels_are_divided_evenly_to_one():
    shards = Shards()
    shards.size = 4
    assert shards.counts(10) == [3, 3, 2, 2]
    assert shards.counts(8) == [2, 2, 2, 2]
    assert shards.counts(3) == [1, 1, 1, 0]
    assert shards.slices(10) == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]


def matrix(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (100 * rank + torch.arange(5 * 6)).view(5, 6).to(dtype)


def shards_of_all(world_size: int) -> Shards:
    group = dist.new_group([*range(world_size)])
    assert isinstance(group, dist.ProcessGroup)
    return Shards(group)


def exchanged(rank, world_size, how):
    """Every rank gives rank j column j of its matrix, and some rows to all; what this one gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_WRITTEN_BYTES", 1 << 60 if how == "sockets" else 0)
        if how == "elsewhere":
            patch.setattr(module, "this_machine", lambda: f"machine {rank}")
        shards, found = shards_of_all(world_size), []
        assert bool(shards._windows) == (how != "elsewhere")
        for dtype in TYPES:
            own = matrix(rank, dtype)
            columns = shards.exchange(
                Contribution(
                    copies_of(lambda to, own=own: own[:, to : to + 1]),
                    [(5, world_size)] * world_size,
                    lambda of, to: (slice(None), slice(of, of + 1)),
                    own,
                ),
                "columns",
            )
            counts = shards.counts(NUM_ROWS)
            rows = shards.gathered(own[: counts[rank]], counts, "rows")
            found.append((columns.clone(), rows.clone()))
        total = shards.total(torch.full((3,), rank + 1.0), "sums")
        return found, total, dict(shards.sent)


WAYS = ("memory", "sockets", "elsewhere")


def exchanged_in_every_way(rank, world_size):
    return {how: exchanged(rank, world_size, how) for how in WAYS}


@pytest.mark.multiprocess
def test_every_rank_gets_what_the_others_have_for_it():
    size, counts = 3, [3, 2, 2]
    by_rank = run_ranks(exchanged_in_every_way, size)
    for (rank, ways), how in itertools.product(enumerate(by_rank), WAYS):
        found, total, sent = ways[how]
        for dtype, (columns, rows) in zip(TYPES, found, strict=True):
            matrices = [matrix(r, dtype) for r in range(size)]
            assert torch.equal(columns, torch.stack([m[:, rank] for m in matrices], dim=1)), how
            kept = [m[:n] for m, n in zip(matrices, counts, strict=True)]
            assert torch.equal(rows, torch.cat(kept)), how
            assert columns.dtype == rows.dtype == dtype
        assert total.tolist() == [6.0] * 3, how
        itemsizes = sum(dtype.itemsize for dtype in TYPES)
        assert sent == {
            "columns": 5 * (size - 1) * itemsizes,
            "rows": counts[rank] * 6 * (size - 1) * itemsizes,
            "sums": 2 * (size - 1) * 12 // size,
        }, how


def test_memory_is_used_again_once_its_tensor_is_gone():
    pool, window = Pool(), Window(os.getpid())
    tensor, segment = pool.empty((1000, 100), torch.float32)
    window.tensor(segment, (1000, 100), torch.float32).fill_(3.0)
    assert tensor.eq(3).all()
    part = tensor[10:20]
    del tensor
    _, other = pool.empty((1000, 100), torch.float32)
    assert other != segment  # a view keeps it
    del part
    gc.collect()
    _, again = pool.empty((900, 100), torch.float32)
    assert again == segment
    _, small = pool.empty((1, 1), torch.float32)
    assert small not in (segment, other)  # much too large for so little
