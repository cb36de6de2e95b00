"""What ranks tell each other: the same on every rank."""

import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.world import RankFailed, run_ranks
from vigpipe.errors import InputError
from vigpipe.parallel.agreement import (
    Status,
    agree,
    all_gather_values,
    broadcast_value,
    check_alike,
    run_with_heartbeats,
)

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")


def tell(rank, world_size):
    status = Status(finite=rank != 1, stop=rank == 2, save=False, busy_seconds=rank / 4)
    agreed = agree(status, world_size, CPU)
    return agreed.finite, agreed.stop, agreed.save, agreed.busy_seconds


def test_all_ranks_agree():
    assert run_ranks(tell, 3) == [(False, True, False, [0.0, 0.25, 0.5])] * 3


def test_a_rank_alone_agrees_with_itself():
    agreed = agree(Status(save=True, busy_seconds=2.0), 1, CPU)
    assert (agreed.finite, agreed.stop, agreed.save) == (True, False, True)
    assert broadcast_value("x", 1) == "x"
    assert all_gather_values("x", 1) == ["x"]


def wait_for_rank_0(rank, world_size, fails):
    distributed_c10d._set_pg_timeout(timedelta(seconds=2))

    def work():
        if rank == 0:
            time.sleep(5)
            if fails:
                raise InputError("the fault of the test")
        return rank

    return run_with_heartbeats(work, world_size)


def test_ranks_wait_for_one_that_works_longer_than_a_collective_waits():
    assert run_ranks(wait_for_rank_0, 2, False) == [0, 1]
    with pytest.raises(RankFailed, match="rank 0: InputError: the fault of the test"):
        run_ranks(wait_for_rank_0, 2, True)
    assert run_with_heartbeats(lambda: "alone", 1) == "alone"


def compare(rank, world_size, odd, subject, name, value):
    facts = {
        "options": {"lr": 0.1, "out": None},
        "data": {"training images": 48},
        "software": {"torch": "2.15.0"},
    }
    if rank == odd:
        facts[subject] = {**facts[subject], name: value}
        if value is None:
            del facts[subject][name]
    try:
        check_alike(facts, world_size)
    except InputError as error:
        return str(error)
    return ""


def test_ranks_that_are_alike_go_on():
    assert run_ranks(compare, 3, 0, "options", "lr", 0.1) == ["", "", ""]


@pytest.mark.parametrize(
    ("subject", "name", "value", "message"),
    [
        ("options", "lr", 0.2, "options: lr is 0.2 on rank 2, but 0.1 on rank 0"),
        ("data", "training images", 47, "data: training images is 47 on rank 2, but 48"),
        ("software", "torch", "2.11.0", "software: torch is '2.11.0' on rank 2, but '2.15.0'"),
        ("options", "lr", None, "options: lr is None on rank 2, but 0.1 on rank 0"),
        ("options", "new", 1, "options: new is 1 on rank 2, but None on rank 0"),
    ],
)
def test_the_difference_is_named_on_every_rank(subject, name, value, message):
    told = run_ranks(compare, 3, 2, subject, name, value)
    assert len(set(told)) == 1
    assert told[0].startswith(f"ranks differ in their {message}")
