"""Factors of low rank instead of matrices."""

import pytest
import torch

from tests.replication.together import SHAPES, run_together
from vigpipe.replication.decisions import ALL
from vigpipe.replication.powersgd import PowerSgd


@pytest.mark.parametrize("in_pair", [False, True])
def test_matrices_of_low_rank_arrive_whole(in_pair):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    rights = torch.randn(2, 3, 40, dtype=torch.float64, generator=generator)
    matrices = [(left @ right).view(30, 8, 5) for right in rights]

    def work(exchange, replica):
        named = {"m": matrices[replica]}
        method = PowerSgd(3)
        memory = method.first_memory(named, seed=1)
        sums = method.add_up(named, memory, exchange, 1 - replica if in_pair else ALL)
        return sums.totals["m"]

    for total in run_together(2, work):
        torch.testing.assert_close(total, matrices[0] + matrices[1], rtol=0, atol=1e-10)


def test_only_what_becomes_smaller_is_compressed():
    # (r + c) R against r c: 12 + 15, 9 + 20 and 1 + 30, times R, against 180, 180 and 30.
    assert PowerSgd(1).lossy(SHAPES) == ["conv", "matrix"]
    assert PowerSgd(6).lossy(SHAPES) == ["conv", "matrix"]
    assert PowerSgd(7).lossy(SHAPES) == []
