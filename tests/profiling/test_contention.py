"""Slowdown and transfers, measured by ranks side by side."""

import pytest
import torch

from tests.profiling.quick import make_run, quick_profile
from tests.world import run_ranks


def _measure_beside(rank, world_size):
    torch.set_num_threads(1)
    return quick_profile(make_run(stages=1, dp=world_size), rank, [2])


@pytest.mark.multiprocess
def test_ranks_side_by_side_show_slowdown_and_transfer():
    first, other = run_ranks(_measure_beside, 2)
    assert other is None
    assert len(first.slowdown) == 2
    assert first.slowdown[0] == 1
    assert first.slowdown[1] >= 1
    assert [len(of_round) for of_round in first.rounds] == [2, 2]  # before and after the pieces
    assert min(min(of_round) for of_round in first.rounds) > 0
    assert 0 < first.latency_seconds < 1
    assert 0 < first.bandwidth < 1e12
