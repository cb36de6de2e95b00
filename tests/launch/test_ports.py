"""Gloo listens at the ports of --ports alone."""

import socket

import psutil
import pytest
import torch.distributed as dist

from tests.refusals import check_refusals
from tests.world import RankFailed, free_ports, run_ranks
from vigpipe.errors import InputError
from vigpipe.launch import ports
from vigpipe.launch.environment import Launch


def test_ports_are_a_first_and_a_last_one():
    assert ports.parse_ports("29600-29601") == range(29600, 29602)
    rows = [
        (text, f"--ports {text}: expected the first and the last port, such as 29600-29699")
        for text in ("", "29600", "29601-29600", "80-90", "1024-65536", "1024-2048-4096", "a-b")
    ]
    check_refusals(rows, ports.parse_ports)


def as_on_two_hosts(rank: int) -> Launch:
    return Launch(rank, 4, rank, 2, "torchrun", "env://", "x")


def listen(rank: int, world_size: int, first: int, count: int) -> set[int]:
    """Make groups beside the test's own; return at which ports this rank listens for them."""
    before = {c.laddr[1] for c in psutil.Process().net_connections("tcp")}
    ports.use_ports(f"{first}-{first + count - 1}", as_on_two_hosts(rank))
    try:
        for _ in range(3):
            dist.new_group()
        ports.check_ports(0)
    except RuntimeError as error:
        raise ports.why_not_bound() or error from error
    with ports.listen_within("127.0.0.1", socket.AF_INET) as listener:
        assert listener.getsockname()[1] in range(first, first + count)
    found = psutil.Process().net_connections("tcp")
    return {c.laddr[1] for c in found if c.status == psutil.CONN_LISTEN} - before


@pytest.mark.multiprocess
@pytest.mark.oldest
def test_gloo_listens_within_them():
    first = free_ports(16)
    one, two = run_ranks(listen, 2, first, 16)
    assert len(one) == len(two) == 3
    assert not one & two
    assert one <= set(range(first, first + 16, 2))
    assert two <= set(range(first + 1, first + 16, 2))


@pytest.mark.multiprocess
def test_too_few_are_told():
    first = free_ports(4)
    with pytest.raises(RankFailed, match=f"--ports {first}-{first + 3}: none of the 2") as failed:
        run_ranks(listen, 2, first, 4)
    assert isinstance(failed.value.__cause__, InputError)


def test_ranks_of_one_host_need_none_and_other_systems_have_none(monkeypatch):
    ports.use_ports("20000-20001", Launch(0, 2, 0, 2, "local", None, "x"))
    assert ports._ports is None
    monkeypatch.setattr(ports, "_ports", None)  # as it was, after the test
    monkeypatch.setattr(ports, "_slots", lambda name: iter(()))
    with pytest.raises(InputError, match=r"^--ports 20000-20001: this torch does not import bind"):
        ports.use_ports("20000-20001", as_on_two_hosts(0))
