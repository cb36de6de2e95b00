"""What ranks tell each other: the same on every rank."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.world import RankFailed, run_ranks
from vigpipe.errors import InputError
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel import agreement
from vigpipe.parallel.agreement import (
    Peers,
    Status,
    agree,
    all_gather_values,
    broadcast_value,
    check_alike,
    run_with_heartbeats,
)

pytestmark = pytest.mark.multiprocess


def tell(rank, world_size):
    status = Status(
        finite=rank != 1, stop=rank == 2, save=False, busy_seconds=rank / 4, data_seconds=rank / 8
    )
    agreed = agree(status, Peers(world_size))
    return agreed.finite, agreed.stop, agreed.save, agreed.busy_seconds, agreed.data_seconds


def test_all_ranks_agree():
    assert run_ranks(tell, 3) == [(False, True, False, [0.0, 0.25, 0.5], 0.25)] * 3


def test_a_rank_alone_agrees_with_itself():
    agreed = agree(Status(save=True, busy_seconds=2.0), Peers())
    assert (agreed.finite, agreed.stop, agreed.save) == (True, False, True)
    assert broadcast_value("x", 1) == "x"
    assert all_gather_values("x", 1) == ["x"]


def ready_after(rank, world_size, looks):
    """Agree with ranks that are ready at the look of that number; count their exchanges."""
    num_looks, num_exchanges, gather = 0, 0, dist.all_gather_into_tensor

    def is_ready():
        nonlocal num_looks
        num_looks += 1
        return num_looks >= looks[rank]

    def counted(*args, **options):
        nonlocal num_exchanges
        num_exchanges += 1
        gather(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "EXCHANGE_SECONDS", -1.0)  # one look for each exchange
        patch.setattr(dist, "all_gather_into_tensor", counted)
        agreed = agree(Status(busy_seconds=rank), Peers(world_size), is_ready)
    return agreed.busy_seconds, num_exchanges


def test_ranks_exchange_statuses_until_all_of_them_are_ready():
    """So the rank that waits for its GPU notices a lost peer, which only gloo can tell it."""
    assert run_ranks(ready_after, 3, [1, 7, 4]) == [([0.0, 1.0, 2.0], 7)] * 3
    assert run_ranks(ready_after, 2, [1, 1]) == [([0.0, 1.0], 1)] * 2


def test_a_device_that_does_not_end_a_step_is_given_up():
    with pytest.raises(RuntimeError, match=r"Timed out waiting [0-9]+ms for the device") as caught:
        agree(Status(), Peers(), lambda: False, timeout_seconds=0.05)
    assert is_lost_peer(caught.value)


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
