"""What ranks tell each other: the same on every rank."""

import threading

import pytest
import torch.distributed as dist

from tests.world import PROMPT, RankFailed, run_ranks
from vigpipe.errors import InputError
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel import agreement
from vigpipe.parallel.agreement import Peers, Status, agree, check_alike, run_with_heartbeats
from vigpipe.parallel.values import all_gather_values

pytestmark = pytest.mark.multiprocess


def tell(rank, world_size):
    status = Status(
        finite=rank != 1, stop=rank == 2, save=False, busy_seconds=rank / 4, data_seconds=rank / 8
    )
    agreed = agree(status, Peers(world_size))
    return agreed.finite, agreed.stop, agreed.save, agreed.busy_seconds, agreed.data_seconds


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


def wait_for_rank_0(rank, world_size, fails):
    """Rank 0 works until it has given and got some heartbeats, which do not wait for its work."""
    num_beats, enough, gather = 0, threading.Event(), all_gather_values

    def counted(*args):
        nonlocal num_beats
        num_beats += 1
        if num_beats == 3:
            enough.set()
        return gather(*args)

    def work():
        if rank == 0:
            assert enough.wait(PROMPT)
            if fails:
                raise InputError("the fault of the test")
        return rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "HEARTBEAT_SECONDS", 0.01)
        patch.setattr(agreement, "all_gather_values", counted)
        return run_with_heartbeats(work, world_size)


def compare(rank, world_size, subject, name, value):
    """Rank 2 has another value of a fact."""
    facts = {"options": {"lr": 0.1, "out": None}, "data": {"training images": 48}}
    if rank == 2:
        facts[subject] = {**facts[subject], name: value}
        if value is None:
            del facts[subject][name]
    try:
        check_alike(lambda: facts, world_size)
    except InputError as error:
        return str(error)
    return ""


DIFFERENCES = {
    ("options", "lr", 0.2): "options: lr is 0.2 on rank 2, but 0.1 on rank 0",
    ("data", "training images", 47): "data: training images is 47 on rank 2, but 48",
    ("options", "lr", None): "options: lr is None on rank 2, but 0.1 on rank 0",
    ("options", "new", 1): "options: new is 1 on rank 2, but None on rank 0",
}


def everything(rank, world_size):
    return {
        "told": tell(rank, world_size),
        "ready": [ready_after(rank, world_size, looks) for looks in ([1, 7, 4], [1, 1, 1])],
        "worked": wait_for_rank_0(rank, world_size, fails=False),
        "alike": compare(rank, world_size, "options", "lr", 0.1),
        "different": [compare(rank, world_size, *difference) for difference in DIFFERENCES],
    }


@pytest.fixture(scope="module")
def found():
    by_rank = run_ranks(everything, 3)
    return {name: [answers[name] for answers in by_rank] for name in by_rank[0]}


def test_all_ranks_agree(found):
    assert found["told"] == [(False, True, False, [0.0, 0.25, 0.5], 0.25)] * 3


def test_a_rank_alone_agrees_with_itself():
    assert agree(Status(save=True), Peers()).statuses == [Status(save=True)]
    assert run_with_heartbeats(lambda: "x", 1) == "x"


def test_ranks_exchange_statuses_until_all_of_them_are_ready(found):
    """So the rank that waits for its GPU notices a lost peer, which only gloo can tell it."""
    assert found["ready"] == [[([0.0, 1.0, 2.0], 7), ([0.0, 1.0, 2.0], 1)]] * 3


def test_a_device_that_does_not_end_a_step_is_given_up():
    with pytest.raises(RuntimeError, match=r"Timed out waiting [0-9]+ms for the device") as caught:
        agree(Status(), Peers(), lambda: False, timeout_seconds=0.05)
    assert is_lost_peer(caught.value)


def test_ranks_wait_for_one_that_works_longer(found):
    assert found["worked"] == [0, 1, 2]
    with pytest.raises(RankFailed, match="rank 0: InputError: the fault of the test"):
        run_ranks(wait_for_rank_0, 2, True)


def test_ranks_that_are_alike_go_on_and_a_difference_is_named_on_every_rank(found):
    assert found["alike"] == [""] * 3
    for told, message in zip(
        zip(*found["different"], strict=True), DIFFERENCES.values(), strict=True
    ):
        assert len(set(told)) == 1
        assert told[0].startswith(f"ranks differ in their {message}")
