"""Bandwidths as nccl-tests define them, measured over gloo."""

import pytest
import torch

from tests.selftest.made_up import link_rows, machine
from tests.world import run_ranks
from vigpipe.selftest import links
from vigpipe.selftest.rows import Budget
from vigpipe.selftest.worker import WorkerError


def figures(rank, world_size):
    return list(links._measure_size(1 << 10, rank, world_size, torch.device("cpu")))


@pytest.mark.multiprocess
def test_bandwidths_are_those_of_nccl_tests():
    by_rank = run_ranks(figures, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]  # the slowest rank's
    reduced, passed_on = by_rank[0]
    for figure in (reduced, passed_on):
        assert figure["algorithm_bandwidth"] == pytest.approx(1024 / figure["seconds"])
    assert reduced["bus_bandwidth"] == pytest.approx(4 / 3 * reduced["algorithm_bandwidth"])
    assert passed_on["bus_bandwidth"] == passed_on["algorithm_bandwidth"]


def test_two_gpus_four_and_all_are_measured(monkeypatch):
    worlds = []

    def call(function, world_size, device, sizes, seconds):
        worlds.append(world_size)
        if world_size == 4:
            raise WorkerError("RuntimeError: the ranks ended with exit code 70")
        return [row.values for row in link_rows(8) if row.values["ranks"] == world_size]

    monkeypatch.setattr(links, "call", call)
    rows = list(links.measure(machine(8), Budget(1000)))
    assert worlds == [2, 4, 8]
    assert [row.what for row in rows if row.outcome == "failed"] == ["4 GPUs"]
    assert sum(row.outcome == "measured" for row in rows) == 2 * 2 * len(links.SIZES)
    worlds.clear()
    list(links.measure(machine(3), Budget(1000)))
    assert worlds == [2, 3]


def test_the_table_has_sizes_and_both_bandwidths():
    text = "\n".join(links.section(list(link_rows(8))))
    assert "all-reduce, 8 GPUs, 256 MiB" in text
    assert "send/recv, 2 GPUs, 8 B" in text
    assert "<td>355.71</td><td>622.49</td>" in text
